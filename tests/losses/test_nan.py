"""A NaN anywhere among the features makes the loss NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import megabatch as mb

pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

B, D = 5, 3
IDS = torch.tensor([0, 0, 1, -1, 1])
ALONE = torch.arange(B)
ZEROS = torch.zeros(B)
PAIRS = [("a", "b"), ("b", "c")]

#: Name -> a loss of x, y (b, d), with the rows of one instance alone if b is 1.
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clip": lambda x, y: mb.ClipLoss()(x, y, 2.0),
    "clip, ids": lambda x, y: mb.ClipLoss(label_smoothing=0.1)(x, y, 2.0, ids=IDS[: len(x)]),
    "clip, ignored": lambda x, y: mb.ClipLoss(duplicates="ignored")(
        x, y, 2.0, ids=0 * IDS[: len(x)]
    ),
    "clip, weights of zero": lambda x, y: mb.ClipLoss()(x, y, 2.0, weights=ZEROS[: len(x)]),
    "siglip": lambda x, y: mb.SigLipLoss()(x, y, 2.0, -1.0),
    "siglip, teacher": lambda x, y: mb.SigLipLoss()(
        *[ZEROS[: len(x), None] + 1] * 2,
        *(2.0, -1.0),
        dist_image_features=x,
        dist_text_features=y,
        dist_logit_scale=2.0,
    ),
    "siglip, weights of zero": lambda x, y: mb.SigLipLoss()(
        x, y, 2.0, -1.0, weights=ZEROS[: len(x)]
    ),
    "infonce": lambda x, y: mb.InfoNCELoss(0.5)(x, y),
    "infonce, towers": lambda x, y: mb.InfoNCELoss(0.5, same_tower=("query", "positive"))(x, y),
    "infonce, all one document": lambda x, y: mb.InfoNCELoss(0.5)(x, y, ids=0 * IDS[: len(x)]),
    "infonce, margin": lambda x, y: mb.InfoNCELoss(0.5, margin=-9.0)(x, y),
    "infonce, weights of zero": lambda x, y: mb.InfoNCELoss(0.5)(x, y, weights=ZEROS[: len(x)]),
    "infonce, queue": lambda x, y: mb.InfoNCELoss(0.5)(x, x, queue=y),
    "infonce, negatives": lambda x, y: mb.InfoNCELoss(0.5)(x, x, y),
    "infonce, own": lambda x, y: mb.InfoNCELoss(0.5)(x, x, y[:, None]),
    "infonce, guide": lambda x, y: mb.InfoNCELoss(0.5, margin=-0.1)(
        x.cos().nan_to_num(), x.cos().nan_to_num(), guide_query=x, guide_positive=y
    ),
    "infonce, guide of negatives": lambda x, y: mb.InfoNCELoss(0.5, margin=-9.0)(
        *[ZEROS[: len(x), None] + 1] * 3, guide_query=x, guide_positive=x, guide_negatives=y
    ),
    "ntxent": lambda x, y: mb.NTXentLoss(0.5)(x, y),
    "dcl": lambda x, y: mb.DCLLoss(0.5)(x, y),
    "supcon": lambda x, y: mb.SupConLoss(0.5)(torch.cat([x, y]), IDS[: len(x)].repeat(2)),
    "supcon, no positive": lambda x, y: mb.SupConLoss(0.5)(
        torch.cat([x, y]), torch.arange(2 * len(x))
    ),
    "supcon, in, no positive": lambda x, y: mb.SupConLoss(0.5, form="in")(
        torch.cat([x, y]), torch.arange(2 * len(x))
    ),
    "supcon, references": lambda x, y: mb.SupConLoss(0.5)(x, ALONE[: len(x)], y, ALONE[: len(x)]),
    "supcon, some without positive": lambda x, y: mb.SupConLoss(0.5)(
        x, ALONE[: len(x)], y, 0 * ALONE[: len(x)]
    ),
    "supcon, references of other labels": lambda x, y: mb.SupConLoss(0.5, form="in")(
        x, ALONE[: len(x)], y, 9 + ALONE[: len(x)]
    ),
    "sincere": lambda x, y: mb.SincereLoss(0.5)(torch.cat([x, y]), IDS[: len(x)].repeat(2)),
    "sincere, no positive": lambda x, y: mb.SincereLoss(0.5)(
        torch.cat([x, y]), torch.arange(2 * len(x))
    ),
    "sincere, references": lambda x, y: mb.SincereLoss(0.5, average="pairs")(
        x, ALONE[: len(x)], y, 0 * ALONE[: len(x)]
    ),
    "several modalities": lambda x, y: mb.MultiModalLoss(PAIRS)({"a": x, "b": x, "c": y}, 2.0),
    "matryoshka": lambda x, y: mb.MatryoshkaLoss(mb.ClipLoss(), [2, D])(x, y, 2.0),
    "normalised": lambda x, y: mb.DCLLoss(0.5, normalize=True)(x, y),
}


def features(b: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(b)
    return torch.randn(b, D, generator=generator), torch.randn(b, D, generator=generator)


@pytest.mark.parametrize("b", [B, 2, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_a_nan_anywhere_gives_a_nan(name: str, b: int) -> None:
    assert LOSSES[name](*features(b)).isfinite()
    for side in (0, 1):
        for row in range(b):
            pair = features(b)
            pair[side][row, 1] = torch.nan
            assert LOSSES[name](*pair).isnan(), (side, row)


def test_embeddings_that_are_in_no_pair() -> None:
    loss, nothing = mb.SupConLoss(0.5), torch.zeros(0, dtype=torch.int64)
    for b, references in (
        (1, ()),
        (1, (torch.ones(0, D), nothing)),
        (B, (torch.ones(0, D), nothing)),
    ):
        x = torch.ones(b, D)
        assert loss(x, ALONE[:b], *references) == 0
        x[0, 0] = torch.nan
        assert loss(x, ALONE[:b], *references).isnan()


@pytest.mark.parametrize("name", ["clip", "siglip", "infonce", "ntxent", "dcl", "supcon"])
def test_a_scale_of_nan_gives_a_nan(name: str) -> None:
    x, y = features(B)
    nan = torch.tensor(torch.nan)
    if name == "clip":
        assert mb.ClipLoss()(x, y, nan).isnan()
        assert mb.ClipLoss()(x, y, float("nan")).isnan()
    elif name == "siglip":
        assert mb.SigLipLoss()(x, y, nan, 0.0).isnan()
        assert mb.SigLipLoss()(x, y, 1.0, nan).isnan()
    else:  # on the CPU a temperature of NaN is an error
        loss = {
            "infonce": mb.InfoNCELoss,
            "ntxent": mb.NTXentLoss,
            "dcl": mb.DCLLoss,
            "supcon": mb.SupConLoss,
        }[name](0.5)
        with pytest.raises(ValueError, match="temperature"):
            loss(x, IDS if name == "supcon" else y, temperature=nan)
