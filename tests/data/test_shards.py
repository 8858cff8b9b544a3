from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from megabatch.data.fetch import Fetcher, Request
from megabatch.data.pairs import BadSample, caption_id
from megabatch.data.shards import ShardPairs
from megabatch.errors import UsageError

from .samples import png, sample, write_tar


def test_samples_of_several_shards(tmp_path: Path):
    a = write_tar(tmp_path / "a.tar", sample("0", 10, "zero") + sample("1", 11, "one"))
    b = write_tar(tmp_path / "b.tar", sample("0", 20, " caf\u00e9 \n"))
    pairs = ShardPairs([a, b])
    assert len(pairs) == 3
    assert pairs.damage == []
    assert [pairs[i].caption for i in (2, 0, 1)] == ["caf\u00e9", "zero", "one"]
    assert [pairs[i].key for i in range(3)] == ["a.tar:0", "a.tar:1", "b.tar:0"]
    assert [pairs[i].image.getpixel((0, 0))[0] for i in range(3)] == [10, 11, 20]


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
    "no caption": [b"{}", b"[]", b'"caption"'],
    "empty caption": [b'{"caption": ""}', b'{"caption": null}'],
    "caption is not text": [b'{"caption": 3}', b'{"caption": ["a"]}'],
    "unreadable json": [b"", b"\xff", b"[" * 100_000],
}


def test_ids_that_json_says_stand_in_place_of_the_captions(tmp_path: Path):
    def facts(**values):
        return json.dumps(values).encode()

    members = [("0.png", png()), ("0.txt", b"home"), ("0.json", facts(caption_id=7, caption="x"))]
    members += [("1.png", png()), ("1.json", facts(caption="house", caption_id=7))]
    members += [("2.png", png()), ("2.txt", b"home"), ("2.json", b"{")]
    members += [("3.png", png()), ("3.json", facts(caption="home", caption_id=None))]
    members += [
        (f"{4 + i}.{kind}", data)
        for i, wrong in enumerate((-1, 2**62, "7", True, 7.0))
        for kind, data in (("png", png()), ("json", facts(caption="a", caption_id=wrong)))
    ]
    pairs = ShardPairs([write_tar(tmp_path / "a.tar", members)])
    assert [(pairs[i].caption, pairs[i].id) for i in range(4)] == [
        ("home", 7),
        ("house", 7),
        ("home", None),
        ("home", None),
    ]
    for i in range(4, 9):
        with pytest.raises(BadSample, match="caption_id is not a whole number from 0"):
            pairs[i]
    chunk = Fetcher(pairs, lambda _: torch.zeros(1), lambda texts: torch.zeros(len(texts), 1), 0)[
        Request(0, 0, np.arange(9))
    ]
    assert chunk.ids.tolist() == [7, 7, caption_id("home"), caption_id("home")]


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
        pairs[1]
    assert (caught.value.reason, caught.value.key) == (reason, "a.tar:k")


def test_a_damaged_shard_among_others(tmp_path: Path):
    good = write_tar(tmp_path / "good.tar", sample("0", 1, "one"))
    cut = write_tar(tmp_path / "cut.tar", sample("0", 2, "two") + sample("1", 3, "three"))
    os.truncate(cut, 4 * 1024)
    garbage = tmp_path / "garbage.tar"
    garbage.write_bytes(b"garbage")
    pairs = ShardPairs([cut, garbage, good])
    assert [pairs[i].caption for i in range(len(pairs))] == ["two", "one"]
    assert len(pairs.damage) == 2
    assert str(cut) in pairs.damage[0]
    assert str(garbage) in pairs.damage[1]


def test_no_sample_at_all(tmp_path: Path):
    garbage = tmp_path / "garbage.tar"
    garbage.write_bytes(b"garbage")
    with pytest.raises(UsageError, match=r"no samples in .*garbage\.tar: .*garbage\.tar: "):
        ShardPairs([garbage])
    with pytest.raises(UsageError, match="no member ends in jpg"):
        ShardPairs([write_tar(tmp_path / "empty.tar", [])])


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


def test_it_goes_to_other_processes(tmp_path: Path):
    pairs = ShardPairs([write_tar(tmp_path / "a.tar", sample("0", 1, "one"))])
    assert pairs[0].caption == pickle.loads(pickle.dumps(pairs))[0].caption
