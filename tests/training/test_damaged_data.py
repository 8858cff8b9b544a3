"""What is wrong with the training data is told before training begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megabatch.errors import UsageError
from megabatch.training import train
from megabatch.training.run import Run
from tests.data.samples import sample, write_tar
from tests.training.conftest import MakeConfig


class Begun(Exception):
    """The first step would be next."""


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A shard that breaks off in the tenth of twenty samples."""
    members = [member for i in range(20) for member in sample(f"{i:04}", i, f"caption {i}")]
    path = write_tar(tmp_path / "cut.tar", members)
    os.truncate(path, path.read_bytes().index(b"0009.png") + 530)
    return path


def test_damage_is_told_before_the_first_step(
    make_config: MakeConfig,
    tmp_path: Path,
    cut: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(*_: object) -> None:
        raise Begun

    monkeypatch.setattr(Run, "_steps", begin)
    with pytest.raises(Begun):
        train(make_config(tmp_path / "run", train_data=str(cut)))
    told = "the 9 samples before that are used, what followed is lost"
    assert f"damaged: {cut}: breaks off inside 0009.png" in (out := capsys.readouterr().out)
    assert told in out


def test_where_there_are_too_few_pairs_damage_is_named(
    make_config: MakeConfig, tmp_path: Path, cut: Path
) -> None:
    with pytest.raises(UsageError, match=r"global.batch.size.* 9\b") as caught:
        train(make_config(tmp_path / "run", train_data=str(cut), global_batch_size=16))
    assert f"damaged: {cut}: breaks off inside 0009.png" in str(caught.value)


def test_how_a_table_was_read_is_told_before_the_first_step(
    make_config: MakeConfig,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(*_: object) -> None:
        raise Begun

    monkeypatch.setattr(Run, "_steps", begin)
    monkeypatch.chdir(pictures.parent)
    table = tmp_path / "openclip.csv"  # as OpenCLIP has them: tabs, and relative to where it runs
    table.write_text(pictures.read_text().replace(",", "\t"))
    with pytest.raises(Begun):
        train(make_config(tmp_path / "run", train_data=str(table)))
    assert f"note: {table} is read with a tab between its fields" in capsys.readouterr().out
