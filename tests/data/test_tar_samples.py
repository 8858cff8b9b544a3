from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megabatch.data import open_pairs
from megabatch.data.pairs import BadSample
from megabatch.data.shards import TarSamples
from megabatch.errors import UsageError
from megabatch.evaluation.captions import open_captioned
from megabatch.evaluation.samples import open_labelled
from tests.evaluation.material import picture, png, shard

SAMPLES = [
    {"png": b"0", "cls": b"1", "json": b"{}"},
    {"png": b"1", "cls": b"22"},
    {"png": b"2", "cls": b"333", "txt": b"x" * 2000},
]


def test_every_member_is_read_at_its_place(tmp_path: Path) -> None:
    paths = [shard(tmp_path / "0.tar", SAMPLES), shard(tmp_path / "1.tar", SAMPLES[:1])]
    samples = TarSamples(paths)
    assert len(samples) == 4
    for i, members in enumerate([*SAMPLES, SAMPLES[0]]):
        kinds = {kind.replace("png", "image"): data for kind, data in members.items()}
        assert {kind: samples.read(i, kind) for kind in kinds} == kinds
    assert samples.key(3) == "1.tar:0000"
    assert not samples.has(1, "json")
    assert samples.damage == []
    with pytest.raises(BadSample, match=r"no json: 0\.tar:0001"):
        samples.read(1, "json")


def test_a_file_that_breaks_off_is_used_up_to_there(tmp_path: Path) -> None:
    path = shard(tmp_path / "0.tar", SAMPLES)
    os.truncate(path, 512 * 14 + 1700)  # within the last member
    samples = TarSamples([path])
    assert len(samples) == 3
    assert samples.read(2, "cls") == b"333"
    assert not samples.has(2, "txt")
    assert "0.tar: breaks off inside 0002.txt, at byte 8,868; the 3 samples" in samples.damage[0]
    path.write_bytes(b"this is no tar file" * 100)
    with pytest.raises(
        UsageError, match=r"no samples in .*0\.tar: .* the 0 samples before that are"
    ):
        TarSamples([path])


@pytest.mark.parametrize("opened", [open_pairs, open_captioned, open_labelled])
def test_damage_is_told_alike_by_all_that_read_shards(
    tmp_path: Path, opened: Callable[[str], Any]
) -> None:
    members = [{"png": png(picture(0, i)), "txt": b"a", "cls": b"0"} for i in range(4)]
    path = shard(tmp_path / "0.tar", members)
    size = path.read_bytes().index(b"0002.txt")
    os.truncate(path, size + 100)
    found = opened(str(path))
    assert len(found) == 2
    (damage,) = found.damage
    assert damage.startswith(f"{path}: ")
    assert damage.endswith("the 2 samples before that are used, at least 1 is lost")


@pytest.mark.parametrize("opened", [open_pairs, open_captioned, open_labelled])
def test_shards_of_something_else(tmp_path: Path, opened: Callable[[str], Any]) -> None:
    path = shard(tmp_path / "0.tar", [{"gif": b"", "npy": b""}])
    with pytest.raises(
        UsageError,
        match=r"no samples in .*0\.tar: no member ends in jpg, .* \(there are \.gif, \.npy",
    ):
        opened(str(path))


def test_a_file_cut_after_it_was_read_spoils_its_samples_alone(tmp_path: Path) -> None:
    path = shard(tmp_path / "0.tar", SAMPLES)
    samples = TarSamples([path])
    os.truncate(path, 600)
    assert samples.read(0, "image") == b"0"
    with pytest.raises(BadSample, match="unreadable shard"):
        samples.read(2, "txt")


def test_a_file_written_anew_in_its_place_is_opened_anew(tmp_path: Path) -> None:
    assert TarSamples([shard(tmp_path / "0.tar", SAMPLES)]).read(0, "image") == b"0"
    shard(tmp_path / "1.tar", SAMPLES[1:]).replace(tmp_path / "0.tar")
    assert TarSamples([tmp_path / "0.tar"]).read(0, "image") == b"1"


def test_compressed_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = shard(tmp_path / "0.tar", SAMPLES)
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UsageError, match=r"0\.tar is compressed"):
        TarSamples([path])
    with pytest.raises(UsageError, match=r"cannot read .*No such file"):
        TarSamples([tmp_path / "missing.tar"])
