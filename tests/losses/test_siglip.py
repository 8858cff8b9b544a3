from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from tests.losses.reference import assert_equal
from tests.similarity.dense import softplus_sum
from tests.similarity.features import MAKERS


def test_no_bias_as_openclip_gives_it() -> None:
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    assert torch.equal(mb.SigLipLoss()(x, y, 2.0, None), mb.SigLipLoss()(x, y, 2.0, 0.0))


def test_a_teachers_labels() -> None:
    x, y = MAKERS["random"](10, 10, 6)
    u, v = MAKERS["clustered"](10, 10, 3)
    weights = torch.rand(10, dtype=torch.float64)
    teacher = {"dist_image_features": 3 * u, "dist_text_features": v, "dist_logit_scale": 5.0}
    loss = mb.SigLipLoss(normalize=True)

    def truth(x: Tensor, y: Tensor, s: Tensor, c: Tensor) -> Tensor:
        sides = F.normalize(x), F.normalize(y), s, c
        return softplus_sum(*sides, weight=weights, teacher=(u, v, 5.0, 0.0)) / weights.sum()

    assert_equal(
        lambda x, y, s, c: loss(x, y, s, c, weights=weights, **teacher), truth, *(x, y, 10.0, -3.0)
    )
