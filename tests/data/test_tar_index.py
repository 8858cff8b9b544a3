from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from megabatch.data import tar_index as module
from megabatch.data.tar_index import ABSENT, endings, read_index, tar_index
from megabatch.errors import UsageError

from .samples import png, sample, write_tar

THREE = [member for i in range(3) for member in sample(f"{i:03d}", i, f"caption {i}")]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "a.tar", THREE)


def test_whole_shard(shard: Path):
    index = read_index(str(shard))
    assert index.keys.tolist() == [b"000", b"001", b"002"]
    assert index.damage == ""
    data = shard.read_bytes()
    for row in range(3):
        image, text, document, label = index.spans[row]
        assert tuple(label) == ABSENT
        assert data[image[0] : image.sum()] == png(row)
        assert data[text[0] : text.sum()] == f"caption {row}".encode()
        assert data[document[0] : document.sum()].startswith(b'{"caption"')


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
    index = read_index(str(shard))
    assert index.keys.tolist() == [b"folder.d/key", b"other"]
    offset, size = index.spans[0, 0]
    assert shard.read_bytes()[offset : offset + size] == b"image"
    assert tuple(index.spans[0, 1]) == tuple(index.spans[1, 0]) == ABSENT


@pytest.mark.parametrize("where", ["json of 2", "png of 2", "txt of 2"])
def test_truncated_inside_a_member(shard: Path, where: str):
    extension, key = where.split(" of ")
    offset, size = read_index(str(shard)).spans[int(key), ["png", "txt", "json"].index(extension)]
    os.truncate(shard, offset + size - 1)
    index = read_index(str(shard))
    assert f"breaks off inside 00{key}.{extension}" in index.damage
    assert "samples before that are used" in index.damage
    # Without its txt the last sample still has image and json, which is enough.
    assert len(index.keys) == (3 if extension == "txt" else 2)


def test_truncated_between_members(shard: Path):
    offset = int(read_index(str(shard)).spans[2, 2, 0])
    os.truncate(shard, offset - 512)
    index = read_index(str(shard))
    assert len(index.keys) == 2
    assert "breaks off at byte" in index.damage


def test_truncated_inside_a_header(shard: Path):
    offset = int(read_index(str(shard)).spans[2, 2, 0])
    os.truncate(shard, offset - 200)
    index = read_index(str(shard))
    assert len(index.keys) == 2
    assert index.damage


def test_no_end_mark(shard: Path):
    end = int(read_index(str(shard)).spans[2, 1, 0]) + 512
    os.truncate(shard, end)
    index = read_index(str(shard))
    assert len(index.keys) == 3
    assert index.damage


def test_overwritten_header(shard: Path):
    offset = int(read_index(str(shard)).spans[1, 2, 0])
    with open(shard, "r+b") as file:
        file.seek(offset - 512)
        file.write(np.random.RandomState(0).bytes(512))
    index = read_index(str(shard))
    assert index.keys.tolist() == [b"000"]
    # 000 is complete; 001 is torn, and 002 after it is not read.
    assert index.damage == (
        f"{shard}: no readable header at byte {offset - 512:,} of {shard.stat().st_size:,}; "
        "the 1 sample before that is used, at least 2 are lost"
    )


def test_what_is_lost_is_counted_where_img2dataset_says_how_many_there_were(shard: Path):
    stats = shard.with_name("a_stats.json")
    stats.write_text('{"count": 12, "successes": 10, "status": "success"}')
    assert read_index(str(shard)).damage == ""
    os.truncate(shard, int(read_index(str(shard)).spans[1, 0, 0]))
    index = read_index(str(shard))
    assert index.damage.endswith("the 1 sample before that is used, 9 of 10 are lost")
    for text in ("{", "[]", "{}", '{"successes": "10"}', '{"successes": 0}'):
        stats.write_text(text)
        damage = read_index(str(shard)).damage
        assert damage.endswith("the 1 sample before that is used, at least 1 is lost")


def test_an_image_that_holds_a_tar_is_not_taken_for_lost_samples(tmp_path: Path):
    inner = write_tar(tmp_path / "inner.tar", sample("x", 0, "y")).read_bytes()
    shard = write_tar(tmp_path / "a.tar", [*sample("0", 0, "a"), ("1.png", b"." + inner)])
    offset = int(read_index(str(shard)).spans[1, 0, 0])
    with open(shard, "r+b") as file:
        file.seek(offset - 512)
        file.write(b"\1" * 512)
    assert read_index(str(shard)).damage.endswith(
        "the 1 sample before that is used, what followed is lost"
    )


@pytest.mark.parametrize("data", [b"", b"garbage", b"x" * 10_000], ids=["empty", "short", "long"])
def test_no_tar_at_all(tmp_path: Path, data: bytes):
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    index = read_index(str(path))
    assert len(index.keys) == 0
    assert index.spans.shape == (0, 4, 2)
    assert str(path) in index.damage


def test_every_truncation_keeps_what_is_before_it(shard: Path, tmp_path: Path):
    whole = shard.read_bytes()
    spans = read_index(str(shard)).spans
    ends = spans[:, :, 0].max(axis=1)  # a sample is surely whole if its last member has begun ...
    last = int(spans[2, 1].sum())
    cut = tmp_path / "cut.tar"
    for length in range(0, last, 129):
        cut.write_bytes(whole[:length])
        index = read_index(str(cut))
        assert index.damage
        sure = int((ends + 512 <= length).sum())  # ... and its block has ended
        assert sure <= len(index.keys) <= sure + 1
        np.testing.assert_array_equal(index.spans[:sure], spans[:sure])


def test_the_index_is_cached_until_the_file_changes(shard: Path, monkeypatch):
    first = tar_index(str(shard))
    with monkeypatch.context() as patch:
        patch.setattr(module, "read_index", lambda path: pytest.fail("read again"))
        again = tar_index(str(shard))
    np.testing.assert_array_equal(again.keys, first.keys)
    np.testing.assert_array_equal(again.spans, first.spans)
    os.truncate(shard, int(first.spans[2, 2, 0]))
    changed = tar_index(str(shard))
    assert len(changed.keys) == 2
    assert changed.damage == tar_index(str(shard)).damage != ""


def test_compressed_by_its_content(shard: Path):
    shard.write_bytes(gzip.compress(shard.read_bytes()))
    with pytest.raises(UsageError, match=r"a\.tar is compressed .* unpack it to \.tar"):
        read_index(str(shard))


def test_an_empty_file_says_so(tmp_path: Path):
    (tmp_path / "a.tar").write_bytes(b"")
    damage = read_index(str(tmp_path / "a.tar")).damage
    assert damage.startswith(f"{tmp_path / 'a.tar'}: the file is empty (0 bytes); the 0 samples")


def test_endings_are_those_of_all_members(tmp_path: Path):
    members = [("0.gif", b""), ("0.TXT", b""), ("1.gif", b""), ("1.seg.npy", b"")]
    shard = write_tar(tmp_path / "a.tar", members)
    assert endings(str(shard)) == [".TXT", ".gif", ".seg.npy"]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst"])
def test_compressed(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UsageError, match=f"{name} is compressed"):
        tar_index(str(tmp_path / name))


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(UsageError, match=r"cannot read .*gone\.tar: No such file"):
        tar_index(str(tmp_path / "gone.tar"))
