from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megabatch.data import shards
from megabatch.data.images import decoded
from megabatch.data.pairs import BadSample
from megabatch.data.shards import ShardPairs, TarSamples, _read_index, tar_index
from megabatch.data.sources import open_pairs
from megabatch.errors import UsageError
from megabatch.evaluation.captions import open_captioned
from megabatch.evaluation.samples import open_labelled

from .samples import captions, png, sample, write_tar


def test_samples_of_several_shards(tmp_path: Path):
    a = write_tar(tmp_path / "a.tar", sample("0", 10, "zero") + sample("1", 11, "one"))
    document = json.dumps({"caption": "from json"}).encode()
    members = [*sample("0", 20, " caf\u00e9 \n"), ("1.png", png(21)), ("1.json", document)]
    b = write_tar(tmp_path / "b.tar", members)
    pairs = pickle.loads(pickle.dumps(ShardPairs([a, b])))
    assert pairs.damage == []
    assert captions(pairs) == ["zero", "one", "caf\u00e9", "from json"]
    assert [pairs[i].key for i in range(3)] == ["a.tar:0", "a.tar:1", "b.tar:0"]
    assert [decoded(pairs[i].image).getpixel((0, 0))[0] for i in (2, 0, 1)] == [20, 10, 11]


IMAGE = ("k.png", png())
BAD = [
    ("undecodable image", ("k.jpg", b"\xff\xd8 no picture"), ("k.txt", b"a")),
    ("empty caption", IMAGE, ("k.txt", b" \n")),
    ("no image", ("k.txt", b"a"), ("k.json", b"{}")),
    ("no caption", IMAGE, ("k.cls", b"3")),
    ("unreadable txt", IMAGE, ("k.txt", b"\xff\xfe\xfa")),
    *(("unreadable json", IMAGE, ("k.json", bad)) for bad in (b'{"a', b"\xff", b"[" * 100_000)),
    *(("empty caption", IMAGE, ("k.json", bad)) for bad in (b"{}", b'"a"', b'{"caption": null}')),
    ("caption is not text", IMAGE, ("k.json", b'{"caption": 3}')),
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_bad_samples_keep_their_place(tmp_path: Path, bad: Any):
    reason, *members = bad
    shard = write_tar(tmp_path / "a.tar", sample("a", 1, "one") + members + sample("z", 2, "two"))
    pairs = ShardPairs([shard])
    assert captions(pairs) == ["one", f"({reason})", "two"]
    with pytest.raises(BadSample, match=r"a\.tar:k"):
        decoded(pairs[1].image)


def test_many_more_shards_than_open_files(tmp_path: Path):
    paths = [write_tar(tmp_path / f"{i}.tar", sample("0", 1, f"n {i}")) for i in range(80)]
    pairs = ShardPairs(paths)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert captions(pairs) == [f"n {i}" for i in range(80)]
    assert len(os.listdir("/proc/self/fd")) <= before + 64


THREE = [member for i in range(3) for member in sample(f"{i:03d}", i, f"caption {i}")]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "a.tar", THREE)


def test_a_shard_that_shrinks_while_in_use(shard: Path):
    pairs = ShardPairs([shard])
    os.truncate(shard, 3072)
    with pytest.raises(BadSample, match="unreadable shard"):
        pairs[1]


def test_names(tmp_path: Path):
    members = [
        ("folder.d/key.JPG", b"image"),
        ("folder.d/key.cls", b"7"),
        ("folder.d/key.seg.png", b"not the image"),
        ("folder.d/key.webp", b"second image"),
        ("README", b"no key"),
        ("other.txt", b"a"),
    ]
    samples = TarSamples([write_tar(tmp_path / "a.tar", members)])
    assert [samples.key(i) for i in range(len(samples))] == ["a.tar:folder.d/key", "a.tar:other"]
    assert samples.read(0, "image") == b"image"
    assert not samples.has(0, "txt")
    assert not samples.has(1, "image")


@pytest.mark.parametrize("where", ["json", "png", "txt"])
def test_truncated_inside_a_member(shard: Path, where: str):
    offset, size = tar_index(str(shard))["spans"][2, ["png", "txt", "json"].index(where)]
    os.truncate(shard, offset + size - 1)
    # Without its txt the last sample still has image and json, which is enough.
    pairs = ShardPairs([shard])
    usable = [text for text in captions(pairs) if text.startswith("caption")]
    assert len(usable) == (3 if where == "txt" else 2)
    (damage,) = pairs.damage
    assert f"breaks off inside 002.{where}, at byte {offset - 512:,} of" in damage


def test_overwritten_header(shard: Path):
    offset = int(tar_index(str(shard))["spans"][1, 2, 0])
    with open(shard, "r+b") as file:
        file.seek(offset - 512)
        file.write(np.random.RandomState(0).bytes(512))
    pairs = ShardPairs([shard])
    assert captions(pairs) == ["caption 0"]
    assert pairs.damage == [
        f"{shard}: breaks off without a readable header, at byte {offset - 512:,} of "
        f"{shard.stat().st_size:,}; used up to there (1 sample)"
    ]


def test_every_truncation_keeps_what_is_before_it(shard: Path, tmp_path: Path):
    whole = shard.read_bytes()
    spans = _read_index(str(shard), len(whole))["spans"]
    ends = spans[:, :, 0].max(axis=1)  # a sample is surely whole if its last member has begun ...
    last = int(spans[2, 1].sum())
    cut = tmp_path / "cut.tar"
    for length in range(0, last, 129):
        cut.write_bytes(whole[:length])
        index = _read_index(str(cut), length)
        assert index["damage"]
        sure = int((ends + 512 <= length).sum())  # ... and its block has ended
        assert sure <= len(index["keys"]) <= sure + 1
        np.testing.assert_array_equal(index["spans"][:sure], spans[:sure])


# gzip writes the time into its data, and workers that collect tests seconds apart need equal names.
@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", b"x" * 10_000, gzip.compress(bytes(10_000))],
    ids=["empty", "short", "long", "gzip"],
)
def test_no_tar_at_all(tmp_path: Path, data: bytes):
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"no samples in .*a\.tar: .*a\.tar: .*, at byte 0 of"):
        ShardPairs([path])
    with pytest.raises(UsageError, match=r"cannot read .*gone\.tar: No such file"):
        ShardPairs([tmp_path / "gone.tar"])


def test_the_index_is_cached_until_the_file_changes(shard: Path, monkeypatch):
    first = tar_index(str(shard))
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_read_index", lambda *_: pytest.fail("read again"))
        assert captions(ShardPairs([shard])) == [f"caption {i}" for i in range(3)]
    os.truncate(shard, int(first["spans"][2, 2, 0]))
    changed = ShardPairs([shard])
    assert len(changed) == 2
    assert changed.damage == ShardPairs([shard]).damage != []


@pytest.mark.parametrize("opened", [open_pairs, open_captioned, open_labelled])
def test_damage_is_told_alike_by_all_that_read_shards(
    tmp_path: Path, opened: Callable[[str], Any]
) -> None:
    members = [
        (f"{i}.{kind}", data)
        for i in range(4)
        for kind, data in (("png", png(i)), ("txt", b"a"), ("cls", b"0"))
    ]
    path = write_tar(tmp_path / "0.tar", members)
    os.truncate(path, path.read_bytes().index(b"2.txt") + 100)
    found = opened(str(path))
    (damage,) = found.damage
    assert damage.startswith(f"{path}: breaks off without a readable header")
    assert damage.endswith("used up to there (3 samples)")
    path = write_tar(tmp_path / "1.tar", [("0.gif", b""), ("0.npy", b"")])
    with pytest.raises(UsageError, match=r"no samples in .*1\.tar: no member ends in jpg, "):
        opened(str(path))


def test_a_file_written_anew_in_its_place_is_opened_anew(shard: Path) -> None:
    assert captions(ShardPairs([shard]))[0] == "caption 0"
    write_tar(shard.with_name("b.tar"), THREE[3:]).replace(shard)
    assert captions(ShardPairs([shard])) == ["caption 1", "caption 2"]
