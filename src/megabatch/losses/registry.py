"""The registry of losses, with one entry each for the trainer, planner and documentation.

Needs no torch, so that `megabatch train --help` can list them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

_TEMPERATURE = {"temperature": 1.0}  # a placeholder: each call gives the model's own


@dataclass(frozen=True)
class LossEntry:
    """One loss.

    name: of the class in `megabatch.losses`.
    purpose: the data or the task it is for: its line in docs/losses.md.
    paper, arxiv: authors and year, and the number on arXiv.
    option: value of `--loss`; "" if the trainer does not offer it, as the loss needs more than two
        feature matrices, a scale and a bias. The fields below matter to those with an option only.
    summary: text of the option for `--help`.
    work: floating-point operations of forward and backward pass, in units of b² d.
    scale_as: argument of `forward` that takes the model's logit scale; "temperature" its inverse.
    takes_bias: whether `forward` takes a `logit_bias` and the loss depends on it. A bias common to
        all logits cancels in a softmax.
    initial_scale, initial_bias: starting values of the model's log scale and bias; None: its own.
    arguments: of the constructor, always.
    duplicates: for each value of `--duplicates` that the loss supports, further arguments of the
        constructor. With any value but "negatives" `forward` takes `ids`.
    settings: settings of the trainer that only this loss uses, and the constructor's names of them.
    negatives: further arguments of the constructor with `--hard-negatives`, when `forward` takes
        `negatives`; None: the loss takes none.
    """

    name: str
    purpose: str
    paper: str
    arxiv: str
    option: str = ""
    summary: str = ""
    work: int = 8
    scale_as: Literal["logit_scale", "temperature"] = "logit_scale"
    takes_bias: bool = False
    initial_scale: float | None = None
    initial_bias: float | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    duplicates: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"negatives": {}})
    settings: Mapping[str, str] = field(default_factory=dict)
    negatives: Mapping[str, Any] | None = None


ENTRIES = (
    LossEntry(
        name="ClipLoss",
        purpose="image–text pairs (or any two towers), as CLIP",
        paper="Radford et al. 2021",
        arxiv="2103.00020",
        option="clip",
        summary="cross-entropy in both directions",
        duplicates={
            "negatives": {},
            "positives": {"duplicates": "positive"},
            "ignored": {"duplicates": "ignored"},
        },
        settings={"label_smoothing": "label_smoothing"},
    ),
    LossEntry(
        name="DistillClipLoss",
        purpose="the same, and a teacher whose similarities the model should learn",
        paper="Wu et al. 2023",
        arxiv="2309.12314",
    ),
    LossEntry(
        name="SigLipLoss",
        purpose="image–text pairs, with a loss without a softmax over the batch",
        paper="Zhai et al. 2023",
        arxiv="2303.15343",
        option="siglip",
        summary="a sigmoid for each pair on its own",
        work=6,
        takes_bias=True,
        initial_scale=math.log(10),
        initial_bias=-10.0,
        duplicates={"negatives": {}, "positives": {}},
    ),
    LossEntry(
        name="InfoNCELoss",
        purpose="queries, documents and hard negatives, for retrieval",
        paper="van den Oord et al. 2018",
        arxiv="1807.03748",
        option="infonce",
        summary="cross-entropy of images against texts only",
        scale_as="temperature",
        arguments=_TEMPERATURE,
        duplicates={"negatives": {}, "ignored": {}},
        settings={"infonce_margin": "margin"},
        negatives={"share_negatives": True},  # of all queries, as in sentence-transformers
    ),
    LossEntry(
        name="NTXentLoss",
        purpose="two or more augmented views of each image, no labels",
        paper="Chen et al. 2020",
        arxiv="2002.05709",
        option="ntxent",
        summary="image and text as two views of one instance, each view against all others",
        work=16,  # a matrix of 2b rows, of which half suffices
        scale_as="temperature",
        arguments=_TEMPERATURE,
    ),
    LossEntry(
        name="DCLLoss",
        purpose="the same, with a batch of a few hundred",
        paper="Yeh et al. 2021",
        arxiv="2110.06848",
        option="dcl",
        summary="as ntxent, without the positive in the denominator",
        work=16,
        scale_as="temperature",
        arguments=_TEMPERATURE,
    ),
    LossEntry(
        name="SupConLoss",
        purpose="class labels",
        paper="Khosla et al. 2020",
        arxiv="2004.11362",
    ),
    LossEntry(
        name="SincereLoss",
        purpose="the same, if positives should not compete with each other",
        paper="Feeney and Hughes 2023",
        arxiv="2309.14277",
    ),
    LossEntry(
        name="MatryoshkaLoss",
        purpose="features that are to remain useful when truncated",
        paper="Kusupati et al. 2022",
        arxiv="2205.13147",
    ),
    LossEntry(
        name="MultiModalLoss",
        purpose="three or more modalities, some missing",
        paper="Girdhar et al. 2023",
        arxiv="2305.05665",
    ),
)

#: The losses that the trainer offers, by option.
TRAINABLE = {entry.option: entry for entry in ENTRIES if entry.option}

if TYPE_CHECKING:
    LossName: TypeAlias = str
else:
    LossName = Literal[tuple(TRAINABLE)]


def describe_losses() -> str:
    """The values of `--loss`, each with its summary."""
    return "; ".join(f"{name}: {entry.summary}" for name, entry in TRAINABLE.items()) + "."


def describe_duplicates() -> str:
    """The values of `--duplicates` that each loss supports."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, entry in TRAINABLE.items():
        names.setdefault(tuple(entry.duplicates), []).append(name)
    return "; ".join(f"{' and '.join(n)}: {', '.join(v)}" for v, n in names.items()) + "."


def losses_with(setting: str) -> list[str]:
    """The options of the losses that use a setting of the trainer; none: it is not a loss's own."""
    return [name for name, entry in TRAINABLE.items() if setting in entry.settings]
