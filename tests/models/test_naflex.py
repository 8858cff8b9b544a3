"""Images as patches: timm's transforms and batches, and towers to which padding is nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.naflex_dataset import NaFlexCollator

from megabatch.errors import UsageError
from megabatch.models import ModelOptions, Towers, create
from megabatch.models.padding import trimmed
from tests.models.tiny import TINY
from tests.models.tiny_naflex import NAFLEX

SIZES = ((40, 30), (20, 100), (64, 64), (9, 9), (300, 8), (33, 47))


def naflex(length: int = 24, **options: Any) -> Towers:
    torch.manual_seed(0)
    return create(NAFLEX, options=ModelOptions(image_seq_len=length, **options))


def pictures() -> list[Image.Image]:
    generator = np.random.default_rng(0)
    return [
        Image.fromarray(generator.integers(0, 256, (high, wide, 3), dtype=np.uint8))
        for wide, high in SIZES
    ]


def test_features_are_those_of_timms_own_pipeline_with_pixels_in_float() -> None:
    towers = naflex()
    own = towers.eval_transform.collate([*map(towers.eval_transform, pictures())])  # type: ignore[attr-defined]
    assert {name: (tensor.dtype, *tensor.shape) for name, tensor in own.items()} == {
        "patches": (torch.uint8, 6, 24, 48),
        "patch_coord": (torch.int64, 6, 24, 2),
        "patch_valid": (torch.bool, 6, 24),
    }
    assert towers.lengths["image"](own).tolist() == [24, 20, 16, 16, 24, 24]
    grids = (own["patch_coord"].amax(1) + 1).tolist()
    assert grids == [[4, 6], [10, 2], [4, 4], [4, 4], [1, 24], [6, 4]]  # the images' aspect ratios
    visual: Any = towers.module.visual
    transform = create_transform(
        naflex=True,
        patchify=True,
        patch_size=4,
        max_seq_len=24,
        interpolation="bicubic",
        **{name: visual.preprocess_cfg[name] for name in ("mean", "std")},
    )
    batch, _ = NaFlexCollator(24)([(transform(picture), 0) for picture in pictures()])
    towers.module.eval()
    with torch.no_grad():
        torch.testing.assert_close(visual(own), visual.head(visual.trunk(batch)))


def test_neither_the_content_nor_the_width_of_padding_changes_features() -> None:
    towers = naflex(50)
    batch = towers.eval_transform.collate([*map(towers.eval_transform, pictures()[-2:-1])])  # type: ignore[attr-defined]
    encode = towers.module.double().visual
    short = trimmed(batch, towers.lengths["image"])
    assert short["patches"].shape == (1, 40, 48)
    noise = torch.randint(256, batch["patches"].shape, dtype=torch.uint8)
    other = torch.where(batch["patch_valid"][..., None], batch["patches"], noise)
    assert not torch.equal(other, batch["patches"])
    for changed in (short, {**batch, "patches": other}):
        torch.testing.assert_close(encode(changed), encode(batch), rtol=0, atol=1e-13)


def test_training_crops_at_random() -> None:
    transform, picture = naflex().train_transform, pictures()[-1]
    seen = []
    for seed in (1, 1, 2):
        random.seed(seed)
        seen.append(transform(picture)["patches"])
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert len(transform(picture.convert("L"))["patches"]) <= 24


def test_other_towers_and_patch_dropout_are_refused() -> None:
    with pytest.raises(UsageError, match=f"--image-seq-len 9: the image tower of {TINY} takes"):
        create(TINY, options=ModelOptions(image_seq_len=9))
    with pytest.raises(UsageError, match="--image-seq-len: glyph-small has no such option"):
        create("glyph-small", options=ModelOptions(image_seq_len=9))
    with pytest.raises(UsageError, match="drops patches in training, padding or not"):
        naflex(force_patch_dropout=0.5)
    assert "image" not in create(NAFLEX).lengths  # images of one size
