"""The losses that the trainer offers, with one entry each for the trainer and the planner.

Needs no torch, so that `megabatch train --help` can list them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LossEntry:
    """One loss of image and text features."""

    name: str  #: of the class in `megabatch.losses`
    summary: str  #: text of the option for `--help`
    work: int = 8  #: floating-point operations of both passes, in units of b² d
    #: Arguments of `forward` for the model's scale ("logit_scale", or "temperature", its inverse),
    #: for its bias ("logit_bias", if the loss depends on it: in a softmax it cancels), and for the
    #: masks of tokens.
    takes: tuple[str, ...] = ("logit_scale",)
    initial_scale: float | None = None  #: of the model's log scale; None: its own
    initial_bias: float | None = None  #: likewise
    #: For each value of `--duplicates` that the loss supports, further arguments of the
    #: constructor. With any value but "negatives" `forward` takes `ids`.
    duplicates: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"negatives": {}})
    #: Further arguments of the constructor.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Settings of the trainer that only this loss uses, and the constructor's names of them.
    settings: Mapping[str, str] = field(default_factory=dict)
    #: Further arguments of the constructor with `--hard-negatives`, when `forward` takes
    #: `negatives`; None: the loss takes none.
    negatives: Mapping[str, Any] | None = None
    #: Whether it compares texts by features of their tokens.
    multi_vector: bool = False


#: By the value of `--loss`.
TRAINABLE = {
    "clip": LossEntry(
        "ClipLoss",
        summary="cross-entropy in both directions",
        duplicates={
            "negatives": {},
            "positives": {"duplicates": "positive"},
            "ignored": {"duplicates": "ignored"},
        },
        settings={"label_smoothing": "label_smoothing"},
    ),
    "siglip": LossEntry(
        "SigLipLoss",
        summary="a sigmoid for each pair on its own",
        work=6,
        takes=("logit_scale", "logit_bias"),
        initial_scale=math.log(10),
        initial_bias=-10.0,
        duplicates={"negatives": {}, "positives": {}},
    ),
    "infonce": LossEntry(
        "InfoNCELoss",
        summary="cross-entropy of images against texts only",
        takes=("temperature",),
        duplicates={"negatives": {}, "ignored": {}},
        settings={"infonce_margin": "margin"},
        negatives={"share_negatives": True},  # of all queries, as in sentence-transformers
    ),
    "maxsim": LossEntry(
        "MaxSimLoss",
        summary="infonce with a feature for each token of the texts (late interaction)",
        takes=("temperature", "query_mask", "document_mask"),
        duplicates={"negatives": {}, "ignored": {}},
        arguments={"score": "mean"},  # between -1 and 1, as other losses': the scale is theirs
        negatives={"share_negatives": True},
        multi_vector=True,
    ),
    "ntxent": LossEntry(
        "NTXentLoss",
        summary="image and text as two views of one instance, each view against all others",
        work=16,  # a matrix of 2b rows, of which half suffices
        takes=("temperature",),
    ),
    "dcl": LossEntry(
        "DCLLoss",
        summary="as ntxent, without the positive in the denominator",
        work=16,
        takes=("temperature",),
    ),
}


def describe_losses() -> str:
    """The values of `--loss`, each with its summary."""
    return "; ".join(f"{name}: {entry.summary}" for name, entry in TRAINABLE.items()) + "."


def losses_with(setting: str) -> list[str]:
    """The options of the losses that use a setting of the trainer; none: it is not a loss's own."""
    return [name for name, entry in TRAINABLE.items() if setting in entry.settings]
