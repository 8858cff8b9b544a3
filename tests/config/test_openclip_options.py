"""Options of OpenCLIP's trainer: each is one of ours, or met with what to use instead."""

from __future__ import annotations

import argparse
import fnmatch
import re
from dataclasses import fields
from typing import get_args, get_type_hints
from unittest.mock import patch

import pytest

from megabatch.cli import main
from megabatch.config.openclip_options import INSTEAD, VALUES
from megabatch.training import TrainConfig

OURS = {f"--{field.name.replace('_', '-')}" for field in fields(TrainConfig)}


@pytest.fixture(scope="module")
def openclips() -> dict[str, argparse.Action]:
    params = pytest.importorskip("open_clip_train.params")
    made: list[argparse.ArgumentParser] = []
    parse = argparse.ArgumentParser.parse_args

    def remember(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
        made.append(parser)
        return parse(parser, words)

    with patch.object(argparse.ArgumentParser, "parse_args", remember):
        params.parse_args([])
    actions = (action for action in made[0]._actions if action.dest != "help")
    return {name: action for action in actions for name in action.option_strings}


def test_every_option_of_openclip_is_ours_or_met(openclips: dict[str, argparse.Action]) -> None:
    assert len(openclips) >= 90
    of_each = {name: fnmatch.filter(openclips.keys() - OURS, name) for name in INSTEAD}
    met = [name for names in of_each.values() for name in names]
    assert sorted(met) == sorted(openclips.keys() - OURS)  # and each once
    if "--fsdp" in openclips:  # OpenCLIP 4, which has all but three of 3's
        none = {name for name, names in of_each.items() if not names}
        assert none == {"--horovod", "--torchscript", "--trace"}


def test_every_value_of_openclip_is_ours_or_met(openclips: dict[str, argparse.Action]) -> None:
    hints = get_type_hints(TrainConfig)
    for name, action in openclips.items():
        if action.choices and name in OURS:
            setting = action.dest
            assert set(action.choices) <= {*get_args(hints[setting]), *VALUES[setting]}


def test_what_is_to_be_used_instead_exists() -> None:
    told = [*INSTEAD.values(), *(text for values in VALUES.values() for text in values.values())]
    elsewhere = {"--class-data", "--accum-freq"}  # of megabatch eval; named as OpenCLIP's own
    for text in told:
        assert set(re.findall(r"--[a-z0-9-]+", text)) <= OURS | elsewhere, text


@pytest.mark.parametrize("command", ["train", "plan"])
def test_each_is_told_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = {option.replace("*", "x"): text for option, text in INSTEAD.items()}
    assert main([command, *(word for option in told for word in (option, "7"))]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == f"megabatch {command}: several things:"
    assert lines == [f"  - {option}: {text}" for option, text in told.items()]


@pytest.mark.parametrize(
    ("setting", "value"), [(name, value) for name, values in VALUES.items() for value in values]
)
def test_values_too(setting: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"--{setting}", value]) == 2
    told = f"megabatch train: --{setting} {value}: {VALUES[setting][value]}\n"
    assert capsys.readouterr().err == told


def test_a_whole_command_of_openclip_is_answered_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (
        "--train-data shards/{000..099}.tar --train-num-samples 1000 --dataset-type webdataset "
        "--batch-size 320 --precision amp_bfloat16 --workers 4 --imagenet-val /data/val "
        "--model ViT-B-32 --local-loss --gather-with-grad --report-to tensorboard --warmup 2000"
    )
    assert main(["train", *words.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "megabatch train: several things:"
    assert [line.split(":")[0].removeprefix("  - ") for line in lines[1:]] == [
        *("--train-num-samples", "--dataset-type", "--batch-size", "--imagenet-val"),
        *("--local-loss", "--gather-with-grad", "--precision amp_bfloat16"),
    ]
