from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from machinery.study_data import TOWERS, in_other_colours, load, pack
from megabatch.data.images import decoded
from megabatch.data.sources import open_pairs
from tests.benchmarks.study_files import write_icons, write_texts

CPU = torch.device("cpu")


def test_packed_icons_are_ink_of_four_bits_with_their_own_captions(tmp_path: Path) -> None:
    folder = write_icons(tmp_path / "icons")
    pack(folder, tmp_path / "icons.npz")
    data = load("icons", tmp_path / "icons.npz", CPU)
    parts = [data.train, data.tests["validation"], data.tests["in_domain"]]
    assert [len(part.ids) for part in parts] == [185, 5, 10]  # the hash's, for these keys
    assert len(data.tests["unseen"].ids) == 20
    packed = torch.cat([part.first for part in parts])
    assert len(packed.unique(dim=0)) == 200  # none is in two parts
    pixels = torch.stack([packed >> 4, packed & 15], -1).view(-1, 32, 32)
    source = open_pairs(str(folder / "train"))
    drawn = {(15 - (np.asarray(decoded(source[i].image)) >> 4)).tobytes() for i in range(200)}
    assert {image.numpy().tobytes() for image in pixels} == drawn
    same = data.train.ids[:, None] == data.train.ids
    assert torch.equal((data.train.second[:, None] == data.train.second).all(2), same)
    assert torch.isin(data.tests["seen"].ids, data.train.ids).all()


def test_texts_are_cut_and_divided(tmp_path: Path) -> None:
    data = load("texts", write_texts(tmp_path / "texts.npz"), CPU)
    assert [*data.tests] == ["validation", "in_domain", "unseen", "seen"]
    assert data.train.first.shape == (60, 16)
    assert data.train.second.shape == (60, 32)
    held_out = torch.cat([data.tests[name].ids for name in ("validation", "in_domain", "unseen")])
    assert not torch.isin(held_out, data.train.ids).any()
    assert torch.equal(data.train.second[0], data.train.second[1])  # of one document
    assert data.train.ids[0] == data.train.ids[1] != data.train.ids[2]


def test_colours_keep_an_icon_visible() -> None:
    ink = torch.zeros(500, 1, 32, 32)
    ink[:, :, :16] = 1
    drawn = in_other_colours(ink)
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    contrast = drawn[:, 0, 0, 0] - drawn[:, 0, -1, 0]
    assert contrast.abs().min() >= 0.4 - 1e-6
    assert 150 < (contrast > 0).sum() < 350  # both light and dark backgrounds


@pytest.mark.parametrize("name", ["icons", "texts"])
def test_training_sees_another_form_of_each_sample(name: str) -> None:
    torch.manual_seed(0)
    towers = TOWERS[name]()
    tokens = torch.randint(1, 100, (3, 16), dtype=torch.int32)
    first = torch.randint(256, (3, 512), dtype=torch.uint8) if name == "icons" else tokens
    for tower, rows in zip(towers, (first, tokens), strict=True):
        tower.train()
        assert not torch.equal(tower(rows), tower(rows))
        tower.eval()
        assert torch.equal(tower(rows), tower(rows))
