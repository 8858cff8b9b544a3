"""The page of results: its introduction, and its sections in the order in which a user asks."""

from __future__ import annotations

from megabatch.benchmarking.report import (
    beyond,
    exactness,
    loss,
    paper,
    parallel,
    robustness,
    steps,
    training,
)

INTRODUCTION = """
`megabatch bench report` generates this page from records of measurements; do not edit it by hand.
Each table names its records, and each section ends with their commands, machines and dates.

Every figure was measured, except where a line says *reported* (by others, not measured here),
*computed*, *extrapolated* or *simulated*. Contenders such as OpenCLIP's loss are the published
packages, run together with this library on the same inputs. A GiB has 2^30 bytes.
"""

SECTIONS = (
    exactness.SECTION,
    loss.MEMORY,
    loss.SPEED,
    parallel.SECTION,
    steps.SECTION,
    paper.SECTION,
    training.ACCURACY,
    training.SECTION,
    robustness.SECTION,
    beyond.SIMULATED,
    beyond.HOSTS,
)
