"""A simulation of losses on up to thousands of GPUs: docs/design/simulation.md."""
