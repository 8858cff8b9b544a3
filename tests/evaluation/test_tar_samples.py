from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from megabatch.data.pairs import BadSample
from megabatch.errors import UsageError
from megabatch.evaluation.tar_samples import TarSamples, first_members
from tests.evaluation.material import shard

SAMPLES = [{"cls": b"1", "json": b"{}"}, {"cls": b"22"}, {"cls": b"333", "txt": b"x" * 2000}]


def test_every_member_is_read_at_its_place(tmp_path: Path) -> None:
    paths = [shard(tmp_path / "0.tar", SAMPLES), shard(tmp_path / "1.tar", SAMPLES[:1])]
    samples = TarSamples(paths)
    assert len(samples) == 4
    for i, members in enumerate([*SAMPLES, SAMPLES[0]]):
        assert {kind: samples.read(i, kind) for kind in members} == members
    assert samples.key(3) == "1.tar:0000"
    assert not samples.has(1, "json")
    assert samples.damage == []
    assert first_members(paths[0]) == SAMPLES[0]
    with pytest.raises(BadSample, match=r"no json: 0\.tar:0001"):
        samples.read(1, "json")


def test_a_file_that_breaks_off_is_used_up_to_there(tmp_path: Path) -> None:
    path = shard(tmp_path / "0.tar", SAMPLES)
    os.truncate(path, 512 * 8 + 700)  # within the last member
    samples = TarSamples([path])
    assert len(samples) == 3
    assert samples.read(2, "cls") == b"333"
    assert not samples.has(2, "txt")
    assert (
        "0.tar: breaks off inside 0002.txt; the 3 samples before that are used"
        in (samples.damage[0])
    )
    path.write_bytes(b"this is no tar file" * 100)
    assert len(TarSamples([path])) == 0
    assert first_members(path) == {}


def test_a_file_cut_after_it_was_read_spoils_its_samples_alone(tmp_path: Path) -> None:
    path = shard(tmp_path / "0.tar", SAMPLES)
    samples = TarSamples([path])
    os.truncate(path, 600)
    assert samples.read(0, "cls") == b"1"
    with pytest.raises(BadSample, match="unreadable shard"):
        samples.read(2, "txt")
    path.unlink()
    with pytest.raises(BadSample, match="unreadable shard"):
        samples.read(0, "cls")


def test_compressed_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = shard(tmp_path / "0.tar", SAMPLES)
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UsageError, match=r"0\.tar is compressed"):
        TarSamples([path])
    with pytest.raises(UsageError, match=r"cannot read .*No such file"):
        TarSamples([tmp_path / "missing.tar"])
