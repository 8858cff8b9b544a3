"""Modules that the scripts in benchmarks/ share, beyond `megabatch.benchmarking`.

Further losses and their exact values, contenders side by side in one process, workers that may
crash, and several processes with a GPU each.
"""
