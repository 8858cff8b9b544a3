"""`python -m megabatch` is the same program as `megabatch`."""

import sys

from megabatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
