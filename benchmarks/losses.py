"""Losses other than CLIP's on one GPU: time, memory, share of the product, error.

    python benchmarks/losses.py --output benchmarks/results/losses.json

SigLIP's loss and siglip-kernel; NT-Xent and the supervised loss, whose matrix is symmetric, with
and without use of the symmetry; CLIP's loss and InfoNCE with ids and a margin; CLIP's with a
teacher, and alone, also in smaller and larger blocks. The options are those of single_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import single_gpu
from machinery.contenders import WORKSPACES
from machinery.family import FAMILY
from machinery.group import Group
from single_gpu import HEADLINE_SECONDS, alone, beside, case

MASKED = ("infonce-margin", "clip-ids", "clip-ids-ignored", "infonce-ids")


def groups() -> Iterator[Group]:
    """The groups to measure, the most important first."""
    yield beside(case(65_536, loss="siglip"), ("megabatch", "siglip-kernel"), HEADLINE_SECONDS)
    yield alone(case(65_536), HEADLINE_SECONDS)
    for loss in ("nt-xent", "supcon"):  # two views, 65,536 rows together
        yield beside(case(32_768, loss=loss), ("megabatch", "general"))
    for loss in MASKED:
        yield alone(case(65_536, loss=loss))
    yield alone(case(65_536, loss="distillation"))
    # On the features of all others, no negative comes near a margin of 0.1 above its positive.
    yield alone(case(65_536, loss="infonce-margin", features="trained"))
    for loss in ("siglip", "clip"):
        yield alone(case(65_536, loss=loss, features="trained", scale=100.0))
    for d in (512, 1024):
        yield beside(case(65_536, d, loss="siglip"), ("megabatch", "siglip-kernel"))
    for loss in FAMILY:  # the views of NT-Xent and the supervised loss have 16,384 rows together
        b = 8192 if "general" in FAMILY[loss].contenders else 16_384
        yield beside(case(b, loss=loss), ("megabatch", "dense"))
    yield beside(case(65_536), tuple(f"workspace {size} MiB" for size in WORKSPACES))
    yield alone(case(65_536, loss="siglip", dtype="float16"))
    yield alone(case(65_601, loss="siglip"))


def main() -> None:
    single_gpu.main(groups, __file__, __doc__ or "", "benchmarks/results/losses.json")


if __name__ == "__main__":
    main()
