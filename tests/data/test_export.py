from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from webdataset.writer import ShardWriter

from megabatch.data.export import write_glyphs
from megabatch.data.glyphs import GlyphPairs, GlyphSet
from megabatch.data.loader import PairLoader
from megabatch.data.pairs import decoded
from megabatch.data.sources import open_pairs
from megabatch.errors import UsageError

from .samples import to_pixels


@pytest.fixture
def few(glyphs: GlyphSet) -> GlyphPairs:
    part = glyphs.split("train")
    return GlyphPairs(glyphs, part.indices[::97])


def lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])


def test_round_trip(few: GlyphPairs, tmp_path: Path):
    shards = write_glyphs(few, tmp_path / "new" / "shards", samples_per_shard=150)
    assert [path.name for path in shards] == ["00000.tar", "00001.tar", "00002.tar"]
    again = open_pairs(str(tmp_path / "new" / "shards"))
    assert len(again) == len(few) == 373
    for i in range(len(few)):
        assert again[i].caption == few[i].caption
        assert again[i].key.partition(":")[2] == few[i].key
        np.testing.assert_array_equal(np.asarray(decoded(again[i].image)), np.asarray(few[i].image))


def test_training_from_the_shards_sees_the_same_batches(few: GlyphPairs, tmp_path: Path):
    write_glyphs(few, tmp_path / "shards", samples_per_shard=200)
    options = {"batch_size": 64, "transform": to_pixels, "tokenizer": lengths, "seed": 5}
    ours = PairLoader(few, **options)
    theirs = PairLoader(open_pairs(str(tmp_path / "shards")), **options, workers=2)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.texts, b.texts)
        assert torch.equal(a.indices, b.indices)


def test_webdataset_reads_them(few: GlyphPairs, tmp_path: Path):
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    (shard,) = write_glyphs(few, tmp_path / "shards", samples_per_shard=1000)
    with open(shard, "rb") as file:
        members = ({**member, "__url__": "shard"} for member in tar_file_iterator(file))
        samples = list(group_by_keys(members))
    assert len(samples) == len(few)
    assert set(samples[0]) >= {"__key__", "png", "txt", "json"}
    assert samples[7]["txt"].decode() == few[7].caption


def test_the_same_glyphs_give_the_same_bytes(few: GlyphPairs, tmp_path: Path):
    contents = [
        [path.read_bytes() for path in write_glyphs(few, tmp_path / name, samples_per_shard=300)]
        for name in ("a", "b")
    ]
    assert contents[0] == contents[1]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_nothing(few: GlyphPairs, tmp_path: Path, monkeypatch, failure):
    write = ShardWriter.write

    def fail_in_the_second_shard(writer, sample):
        write(writer, sample)
        if writer.total == 150:
            raise failure

    monkeypatch.setattr(ShardWriter, "write", fail_in_the_second_shard)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else UsageError
    with pytest.raises(expected):
        write_glyphs(few, tmp_path / "shards", samples_per_shard=100)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(few: GlyphPairs, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("full", "file"):
        with pytest.raises(UsageError, match=f"{name} exists and is not an empty folder"):
            write_glyphs(few, tmp_path / name, samples_per_shard=100)
    assert (tmp_path / "full" / "mine").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert write_glyphs(few, tmp_path / "empty", samples_per_shard=1000)
