from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megabatch.cli import main
from megabatch.errors import CommunicationError, OutOfMemory, UsageError
from megabatch.evaluation.command import process_group

MODEL = "--model glyph-small --output new"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("missing-folder", "missing-folder is not a folder"),
        ("", "expected either a run's folder or --model NAME"),
        (f". {MODEL} --val-data a.csv", "expected either a run's folder or --model NAME"),
        (". --pretrained a.pt", "--pretrained: only with --model"),
        ("--model glyph-small --val-data a.csv", "--output: needed with --model"),
        (MODEL, "--val-data or --class-data: needed with --model"),
        (f"{MODEL} --val-data a.csv --weights ema", "--weights: chooses between a run's"),
        (". --templates simple", "--templates: only with --class-data"),
        (". --csv-img-key a", "--csv-img-key: only with --val-data"),
        (". --precision int4", "--precision int4: expected 'fp32', 'bf16' or 'fp16'"),
        (". --batch-size 0", "--batch-size 0: expected greater than 0"),
        (". --device nowhere", "--device nowhere: String should match pattern"),
        ("--model glyph-smal --output new --val-data glyphs", "'glyph-smal' is not known; did"),
        (f"{MODEL} --val-data none.csv", "--val-data: nothing matches"),
        (f"{MODEL} --class-data none.tar", "--class-data: nothing matches"),
        (
            "--model glyph-small --output config.toml/folder --val-data glyphs",
            "--output config.toml/folder: {folder}/config.toml is not a folder",
        ),
    ],
)
def test_mistakes_are_told_in_one_line_before_the_evaluation(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.toml").touch()
    assert main(["eval", *arguments.split()]) == 2
    told = capsys.readouterr()
    assert message.format(folder=tmp_path) in told.err
    assert told.err.startswith("megabatch eval: ")
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_a_group_that_cannot_be_formed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with (
        pytest.raises(UsageError, match=r"the processes cannot be joined: .*RANK"),
        process_group(),
    ):
        pass


LOST = "another process is gone, or did not respond within two hours: gathering: rank 2 is gone"


@pytest.mark.parametrize(
    ("rank", "error", "told"),
    [
        (0, CommunicationError("gathering: rank 2 is gone"), f"rank 0 of 3, evaluating: {LOST}"),
        (1, CommunicationError("gathering: rank 2 is gone"), f"rank 1 of 3, evaluating: {LOST}"),
        (1, OutOfMemory("out of memory"), "out of memory"),
        (1, None, ""),
    ],
)
def test_a_rank_that_dies_is_told_in_one_line_by_the_others(
    rank: int,
    error: Exception | None,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def evaluated(*_: object, **__: object) -> dict[str, Any]:
        if error is not None:
            raise error
        return {"retrieval": {}, "zero_shot": {}, "seconds": 1}

    destroyed = []
    monkeypatch.setenv("WORLD_SIZE", "3")
    for name, function in (
        ("init_process_group", lambda **_: None),
        ("get_rank", lambda: rank),
        ("get_world_size", lambda: 3),
        ("destroy_process_group", lambda: destroyed.append(rank)),
    ):
        monkeypatch.setattr(dist, name, function)
    monkeypatch.setattr("megabatch.ranks.is_first", lambda: rank == 0)
    monkeypatch.setattr("megabatch.evaluation.run.evaluate", evaluated)
    assert main(["eval", "runs/mine"]) == (0 if error is None else 1)
    assert capsys.readouterr().err == (f"megabatch eval: {told}\n" if told else "")
    assert bool(destroyed) == (error is None)  # it would wait for a rank that is gone
