from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from tests.losses.reference import assert_equal, supcon_of_logits
from tests.similarity.features import MAKERS

DIMS = (2, 5, 8)


def test_with_labels_and_with_keyword_features_of_three_dimensions() -> None:
    x, _ = MAKERS["clustered"](9, 9, 8)
    labels = torch.arange(9) % 4
    assert_equal(
        lambda x: mb.MatryoshkaLoss(mb.SupConLoss(0.1), [3])(x, labels),
        lambda x: supcon_of_logits(F.normalize(x[:, :3]) @ F.normalize(x[:, :3]).T / 0.1, labels),
        x,
    )
    query, positive = MAKERS["random"](6, 6, 8)
    hard = torch.randn(6, 2, 8, dtype=torch.float64)
    assert_equal(
        lambda q, p, n: mb.MatryoshkaLoss(mb.InfoNCELoss(0.1), [3], normalize=False)(
            q, positive=p, negatives=n
        ),
        lambda q, p, n: F.cross_entropy(
            10 * torch.cat([q[:, :3] @ p[:, :3].T, (q[:, None] * n)[..., :3].sum(2)], 1),
            torch.arange(6),
        ),
        query,
        positive,
        hard,
    )


def test_over_several_modalities() -> None:
    x, y = MAKERS["random"](6, 6, 8)
    inner = mb.MultiModalLoss([("image", "text")])
    cut = mb.MatryoshkaLoss(inner, [4])({"image": x, "text": y}, 10.0)
    plain = mb.ClipLoss()(F.normalize(x[:, :4]), F.normalize(y[:, :4]), 10.0)
    torch.testing.assert_close(cut, plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_teacher_stays_whole_and_tuples_are_summed(by_name: bool) -> None:
    x, y = MAKERS["random"](6, 6, 8)
    u, v = MAKERS["clustered"](6, 6, 3)  # narrower than the prefixes
    loss = mb.DistillClipLoss()
    teacher: Any = {"dist_image_features": u, "dist_text_features": v, "dist_logit_scale": 7.0}
    args, more = ((10.0,), teacher) if by_name else ((10.0, *teacher.values()), {})
    found = mb.MatryoshkaLoss(loss, [4, 8], (1, 2))(x, y, *args, **more)
    parts = [
        loss(F.normalize(x[:, :dim]), F.normalize(y[:, :dim]), 10.0, u, v, 7.0) for dim in (4, 8)
    ]
    assert isinstance(found, tuple)
    for total, small, large in zip(found, *parts, strict=True):
        torch.testing.assert_close(total, small + 2 * large, rtol=1e-12, atol=0)
    named = mb.MatryoshkaLoss(loss, [4, 8], (1, 2))(x, y, *args, **more, output_dict=True)
    assert [*named.values()] == [*found]


def test_prefixes_keep_the_dtype() -> None:
    seen = []

    def loss(x: Tensor) -> Tensor:
        seen.append((x.dtype, x.shape[1]))
        return x.sum()

    mb.MatryoshkaLoss(loss, [2, 4])(torch.randn(3, 4).bfloat16())
    assert seen == [(torch.bfloat16, 2), (torch.bfloat16, 4)]


def test_a_guide_stays_whole() -> None:
    query, positive = MAKERS["random"](8, 8, 6)
    guides = dict(zip(("guide_query", "guide_positive"), MAKERS["random"](8, 8, 2), strict=True))
    loss = mb.InfoNCELoss(0.1, margin=-0.2)
    assert_equal(
        lambda q, p: mb.MatryoshkaLoss(loss, [3, 6], normalize=False)(q, p, **guides),
        lambda q, p: loss(q[:, :3], p[:, :3], **guides) + loss(q, p, **guides),
        query,
        positive,
    )
