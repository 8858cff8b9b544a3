"""The reductions, a file each, with their operators and their tiles in torch operations."""
