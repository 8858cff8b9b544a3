"""Side-by-side measurements: what `megabatch bench` runs.

A benchmark measures contenders, each in a process of its own, and gives one record for each.
Adding a peer or a loss is an entry in `contenders`; nothing else knows them by name.
"""
