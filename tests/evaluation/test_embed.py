from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from megabatch.data.pairs import BadSample
from megabatch.errors import OutOfMemory, UsageError
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.samples import Sample, Samples
from megabatch.models import Towers, create
from tests.evaluation.material import image_features, picture
from tests.models.tiny import TINY


@pytest.fixture(scope="module")
def towers() -> Towers:
    torch.manual_seed(0)
    return create("glyph-small")


class SomeBad(Samples):
    """Every third sample cannot be used."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Sample:
        if index % 3 == 0:
            raise BadSample("empty caption" if index else "undecodable image", f"sample {index}")
        return Sample(Image.new("L", (32, 32), 20 * index), f"caption {index % 2}", f"key {index}")


def test_batches_do_not_change_the_features(towers: Towers) -> None:
    images = [picture(i % 4, i) for i in range(23)]
    whole, parts = (image_features(Encoder(towers, batch_size=b), images) for b in (512, 5))
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
    assert whole.shape == (23, towers.embed_dim)
    assert not whole.requires_grad
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(23))
    names = ["digit one", "digit two", "full stop"]
    whole, parts = (Encoder(towers, batch_size=b).texts(names) for b in (512, 2))
    torch.testing.assert_close(parts, whole)


def test_texts_are_encoded_without_the_padding_that_all_have() -> None:
    towers = create(TINY)
    module: Any = towers.module
    shapes: list[tuple[int, ...]] = []
    module.transformer.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape[:2]))
    texts = ["one", "two", "three and more words than seven, all of them", "four"]
    trimmed = Encoder(towers, batch_size=2).texts(texts)
    assert shapes == [(2, 8), (2, 16)]
    whole = Encoder(replace(towers, lengths={}), batch_size=2).texts(texts)
    assert shapes[2:] == [(2, 16), (2, 16)]
    torch.testing.assert_close(trimmed, whole)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_gives_nearly_the_same_in_float32(towers: Towers, precision: str) -> None:
    names = ["latin small letter a", "digit seven"]
    half = Encoder(towers, precision=precision).texts(names)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.norm(dim=1), torch.ones(2), rtol=0, atol=1e-6)
    assert (half * Encoder(towers).texts(names)).sum(1).min() > 0.99


@pytest.mark.parametrize(("batch_size", "workers"), [(4, 0), (1, 2)])
def test_bad_samples_are_skipped_and_counted(towers: Towers, batch_size: int, workers: int) -> None:
    told: list[str] = []
    encoder = Encoder(towers, batch_size=batch_size, workers=workers, report=told.append)
    got = encoder.embed(SomeBad(), "some")
    ends = range(batch_size, 10 + batch_size, batch_size)
    assert told == [f"some: {min(end, 10)} of 10 images" for end in ends]
    assert got.indices == [1, 2, 4, 5, 7, 8]
    assert got.targets == [f"caption {i % 2}" for i in got.indices]
    assert got.left_out()["skipped"] == {"undecodable image": 1, "empty caption": 3}
    first = {"undecodable image": "sample 0", "empty caption": "sample 3"}
    assert got.left_out()["skipped_first"] == first
    shades = [Image.new("L", (32, 32), 20 * i) for i in got.indices]
    alone = image_features(Encoder(towers), shades)
    torch.testing.assert_close(got.features, alone, rtol=1e-4, atol=1e-5)


def test_samples_none_of_which_is_usable_are_refused(towers: Towers) -> None:
    class AllBad(SomeBad):
        def __getitem__(self, index: int) -> Sample:
            return super().__getitem__(0 if index else 3)

    message = r"^bad: none of 10 samples is usable: 1 × empty .* 9 × undec.*\(first: sample 0\)$"
    with pytest.raises(UsageError, match=message):
        Encoder(towers).embed(AllBad(), "bad")


def test_batches_that_are_too_large_are_told_in_a_sentence(towers: Towers) -> None:
    def full(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB ...")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(towers.module, "encode_text", full)
        with pytest.raises(OutOfMemory, match=r"^out of memory on cpu with --batch-size 8; expect"):
            Encoder(towers, batch_size=8).texts(["one"])
