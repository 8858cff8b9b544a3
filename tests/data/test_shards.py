from __future__ import annotations

import contextlib
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
from megabatch.data.shards import ABSENT, ShardPairs, TarSamples, _read_index, tar_index
from megabatch.data.sources import open_pairs
from megabatch.errors import UsageError
from megabatch.evaluation.captions import open_captioned
from megabatch.evaluation.samples import open_labelled

from .samples import png, sample, write_tar


def test_samples_of_several_shards(tmp_path: Path):
    a = write_tar(tmp_path / "a.tar", sample("0", 10, "zero") + sample("1", 11, "one"))
    b = write_tar(tmp_path / "b.tar", sample("0", 20, " caf\u00e9 \n"))
    pairs = pickle.loads(pickle.dumps(ShardPairs([a, b])))
    assert len(pairs) == 3
    assert pairs.damage == []
    assert [pairs[i].caption for i in (2, 0, 1)] == ["caf\u00e9", "zero", "one"]
    assert [pairs[i].key for i in range(3)] == ["a.tar:0", "a.tar:1", "b.tar:0"]
    assert [decoded(pairs[i].image).getpixel((0, 0))[0] for i in range(3)] == [10, 11, 20]


def test_caption_from_json(tmp_path: Path):
    members = [("0.png", png()), ("0.json", json.dumps({"caption": "from json"}).encode())]
    assert ShardPairs([write_tar(tmp_path / "a.tar", members)])[0].caption == "from json"


BAD = {
    "undecodable image": [("k.jpg", b"\xff\xd8 no picture"), ("k.txt", b"a")],
    "empty caption": [("k.png", png()), ("k.txt", b" \n")],
    "no image": [("k.txt", b"a"), ("k.json", b"{}")],
    "no caption": [("k.png", png()), ("k.cls", b"3")],
    "caption is not UTF-8": [("k.png", png()), ("k.txt", b"\xff\xfe\xfa")],
    "unreadable json": [("k.png", png()), ("k.json", b'{"caption": ')],
}
BAD_JSON = {
    "empty caption": [b"{}", b"[]", b'"caption"', b'{"caption": ""}', b'{"caption": null}'],
    "caption is not text": [b'{"caption": 3}', b'{"caption": ["a"]}'],
    "unreadable json": [b"", b"\xff", b"[" * 100_000],
}


@pytest.mark.parametrize(
    ("reason", "members"),
    [
        *BAD.items(),
        *((r, [("k.png", png()), ("k.json", doc)]) for r, docs in BAD_JSON.items() for doc in docs),
    ],
    ids=str,
)
def test_bad_samples_keep_their_place(tmp_path: Path, reason: str, members):
    shard = write_tar(tmp_path / "a.tar", sample("a", 1, "one") + members + sample("z", 2, "two"))
    pairs = ShardPairs([shard])
    assert len(pairs) == 3
    assert pairs[2].caption == "two"
    with pytest.raises(BadSample) as caught:
        decoded(pairs[1].image)
    assert (caught.value.reason, caught.value.key) == (reason, "a.tar:k")


def test_a_shard_that_shrinks_while_in_use(tmp_path: Path):
    shard = write_tar(tmp_path / "a.tar", sample("0", 1, "one") + sample("1", 2, "two"))
    pairs = ShardPairs([shard])
    os.truncate(shard, 3072)
    with pytest.raises(BadSample, match="unreadable shard"):
        pairs[1]


def test_many_more_shards_than_open_files(tmp_path: Path):
    paths = [write_tar(tmp_path / f"{i}.tar", sample("0", 1, f"n {i}")) for i in range(80)]
    pairs = ShardPairs(paths)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert [pairs[i].caption for i in range(80)] == [f"n {i}" for i in range(80)]
    assert len(os.listdir("/proc/self/fd")) <= before + 64


THREE = [member for i in range(3) for member in sample(f"{i:03d}", i, f"caption {i}")]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "a.tar", THREE)


def test_names(tmp_path: Path):
    members = [
        ("folder.d/key.JPG", b"image"),
        ("folder.d/key.cls", b"7"),
        ("folder.d/key.seg.png", b"not the image"),
        ("folder.d/key.webp", b"second image"),
        ("README", b"no key"),
        ("other.txt", b"a"),
    ]
    shard = write_tar(tmp_path / "a.tar", members)
    index = tar_index(str(shard))
    assert index["keys"].tolist() == [b"folder.d/key", b"other"]
    offset, size = index["spans"][0, 0]
    assert shard.read_bytes()[offset : offset + size] == b"image"
    assert tuple(index["spans"][0, 1]) == tuple(index["spans"][1, 0]) == ABSENT


@pytest.mark.parametrize("where", ["json of 2", "png of 2", "txt of 2"])
def test_truncated_inside_a_member(shard: Path, where: str):
    extension, key = where.split(" of ")
    offset, size = tar_index(str(shard))["spans"][int(key), ["png", "txt", "json"].index(extension)]
    os.truncate(shard, offset + size - 1)
    damage = str(tar_index(str(shard))["damage"])
    assert f"breaks off inside 00{key}.{extension}, at byte {offset - 512:,} of" in damage
    # Without its txt the last sample still has image and json, which is enough.
    pairs, usable = ShardPairs([shard]), 0
    for index in range(len(pairs)):
        with contextlib.suppress(BadSample):
            usable += pairs[index].caption.startswith("caption")
    assert usable == (3 if extension == "txt" else 2)


def test_overwritten_header(shard: Path):
    offset = int(tar_index(str(shard))["spans"][1, 2, 0])
    with open(shard, "r+b") as file:
        file.seek(offset - 512)
        file.write(np.random.RandomState(0).bytes(512))
    index = tar_index(str(shard))
    assert index["keys"].tolist() == [b"000"]
    assert index["damage"] == (
        f"{shard}: breaks off without a readable header, at byte {offset - 512:,} of "
        f"{shard.stat().st_size:,}; used up to there (1 sample)"
    )


@pytest.mark.parametrize("data", [b"", b"garbage", b"x" * 10_000], ids=["empty", "short", "long"])
def test_no_tar_at_all(tmp_path: Path, data: bytes):
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    index = tar_index(str(path))
    assert len(index["keys"]) == 0
    assert index["spans"].shape == (0, 4, 2)
    assert str(path) in str(index["damage"])
    with pytest.raises(UsageError, match=r"no samples in .*a\.tar: .*a\.tar: "):
        ShardPairs([path])


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


def test_the_index_is_cached_until_the_file_changes(shard: Path, monkeypatch):
    first = tar_index(str(shard))
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_read_index", lambda *_: pytest.fail("read again"))
        again = tar_index(str(shard))
    np.testing.assert_array_equal(again["keys"], first["keys"])
    np.testing.assert_array_equal(again["spans"], first["spans"])
    os.truncate(shard, int(first["spans"][2, 2, 0]))
    changed = tar_index(str(shard))
    assert len(changed["keys"]) == 2
    assert changed["damage"] == tar_index(str(shard))["damage"] != ""


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"])
def test_compressed_and_missing_files_are_refused(shard: Path, name: str):
    path = shard.with_name(name)
    path.write_bytes(gzip.compress(shard.read_bytes()))
    with pytest.raises(UsageError, match=rf"{name} is compressed .* unpack it to \.tar"):
        ShardPairs([path])
    with pytest.raises(UsageError, match=r"cannot read .*gone\.tar: No such file"):
        ShardPairs([shard.with_name("gone.tar")])


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
    assert TarSamples([shard]).read(0, "txt") == b"caption 0"
    write_tar(shard.with_name("b.tar"), THREE[3:]).replace(shard)
    samples = TarSamples([shard])
    assert samples.read(0, "txt") == b"caption 1"
    assert not samples.has(0, "cls")
    with pytest.raises(BadSample, match=r"no cls: a\.tar:001"):
        samples.read(0, "cls")
