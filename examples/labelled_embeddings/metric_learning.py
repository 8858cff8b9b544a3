"""Digits by class with pytorch-metric-learning's loss, replaced: supcon.py with one other import.

Needs pytorch-metric-learning and scikit-learn besides megabatch; takes seconds on a CPU.
"""

from supcon import main

# Before: from pytorch_metric_learning.losses import SupConLoss
from megabatch.integrations.pytorch_metric_learning import SupConLoss

if __name__ == "__main__":
    main(SupConLoss(temperature=0.2))
