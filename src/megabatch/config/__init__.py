"""The settings of a training run: declaration, checks, TOML files, command line.

Needs no torch until a device is looked up, so that `--help` is quick. The planner and the trainer
both build on it.
"""
