"""`megabatch bench report`: a page of results, rendered from the records of benchmarks.

`contents` declares the page: sections made of parts, each with the record files that it needs and a
function from their records to Markdown. Nothing is measured or plotted here; figures are the
pictures that benchmarks/plots.py wrote next to the records.
"""
