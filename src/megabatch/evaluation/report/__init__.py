"""`report.html`: the figures, curves and examples of a run, or a comparison of several runs.

An evaluation writes `evaluation.json` and `report.json` (`content.py`); the pages are made from
these files and the run's folder, without the model or the data.
"""
