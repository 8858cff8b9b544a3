"""SimCLR with lightly's loss, replaced: simclr.py with one import of another library.

Needs lightly and scikit-learn besides megabatch; takes seconds on a CPU.
"""

from megabatch.integrations.lightly import NTXentLoss  # before: from lightly.loss import NTXentLoss
from simclr import main

if __name__ == "__main__":
    main(NTXentLoss(temperature=0.2))
