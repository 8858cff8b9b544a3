"""`report.html`: the figures, curves and examples of a run, or a comparison of several runs."""
