"""The settings of a training run, without torch, as `--help` has to be quick."""
