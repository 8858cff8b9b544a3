"""Runs with a loss and a model of the user's own, and which sources may name them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.evaluation import evaluate_run
from megabatch.evaluation.run_folder import open_run
from megabatch.training import load_config
from tests.docs.pages import blocks
from tests.own_parts import MALICIOUS, WriteModule, user_modules

OWN = ["--loss", "mine:FocalClipLoss", "--model", "mine:towers"]

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    with user_modules(tmp_path, monkeypatch) as written:
        yield written


@pytest.fixture
def mine(write: WriteModule) -> Path:
    """The example of the documentation."""
    *_, code = blocks("docs/recipes.md", "python")
    return write("mine", code)


@pytest.fixture
def command(tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command; returns its exit code and all that it printed."""

    def run(*words: str) -> tuple[int, str]:
        small = "--global-batch-size 8 --steps 2 --warmup 1 --precision fp32 --plan off"
        where = ["--train-data", str(pictures), "--output", str(tmp_path / "run")]
        cpu = ["--device", "cpu"]
        more = {"train": [*small.split(), *cpu, *where], "plan": cpu}
        code = main([words[0], *more.get(words[0], []), *words[1:]])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.fixture
def malicious(write: WriteModule, tmp_path: Path) -> Iterator[None]:
    """A module `evil` in the working directory, which must not run."""
    write("evil", MALICIOUS)
    yield
    assert not (tmp_path / "it-ran").exists()


def test_the_example_is_trained_resumed_and_evaluated(
    mine: Path, command: Command, tmp_path: Path, pictures: Path
) -> None:
    code, out = command("train", *OWN)
    assert code == 0, out
    saved = (tmp_path / "run/config.toml").read_text()
    assert 'loss = "mine:FocalClipLoss"' in saved
    assert "megabatch train --config THIS_FILE --output" in saved
    evaluated = ["--steps", "4", "--val-data", str(pictures)]
    code, out = command("train", "--resume", "--trust", *evaluated)
    assert (code, "continuing after step 2" in out, "report:" in out) == (0, True, True), out
    evaluation = ["eval", str(tmp_path / "run"), "--val-data", str(pictures)]
    code, out = command(*evaluation)
    assert code == 2
    assert f"{tmp_path / 'run/config.toml'}: model = 'mine:towers' would run code" in out
    code, out = command(*evaluation, "--trust")
    assert (code, "mine:towers" in out) == (0, True), out
    export = ["export", str(tmp_path / "run"), "--to", "openclip", "--output", "out", "--trust"]
    code, out = command(*export)  # the module is imported; OpenCLIP has no such model
    assert (code, "mine:towers" in out, "would run" in out) == (2, True, False), out


def test_a_plan_says_that_the_memory_of_the_loss_is_unknown(mine: Path, command: Command) -> None:
    code, out = command("plan", *OWN, "--global-batch-size", "64")
    assert code == 0, out
    assert out.endswith("fits without mine:FocalClipLoss, whose memory is unknown\n")
    (row,) = (line for line in out.splitlines() if line.startswith("gradients of the loss"))
    assert row.split()[4] == f"{64 * 64 * 2 * 2 / 2**20:.1f}"  # MiB: bfloat16, images and texts


def test_a_scale_that_the_loss_does_not_take_is_not_trained(
    write: WriteModule, command: Command, tmp_path: Path
) -> None:
    source = "def Loss():\n    return lambda image, text: -(image * text).sum(1).mean()\n"
    write("mine", source)
    code, out = command("train", "--model", "glyph-small", "--loss", "mine:Loss", "--wd", "0")
    assert code == 0, out
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert len({json.loads(line)["logit_scale"] for line in lines}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--loss", "mine:"], "--loss mine:: expected clip, siglip"),
        (
            ["--loss", "mine:FocalClip"],
            "no class or function FocalClip; did you mean FocalClipLoss?",
        ),
        (["--model", "mine:tokenize"], "it needs texts; expected parameters with a default, or op"),
        (
            ["--duplicates", "positives"],
            "--duplicates positives: expected negatives with --loss mine:FocalClipLoss",
        ),
        (["--label-smoothing", "0.1"], "expected with --loss clip, got --loss mine:FocalClipLoss"),
    ],
)
def test_mistakes_are_one_line(
    mine: Path, command: Command, words: list[str], message: str
) -> None:
    code, out = command("train", *OWN, *words)
    assert code == 2
    assert message in out
    assert len(out.splitlines()) == 1


# --- what may name code ------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["loss", "model"])
@pytest.mark.parametrize("name", ["train", "plan"])
@pytest.mark.usefixtures("malicious")
def test_a_configuration_may_not(command: Command, tmp_path: Path, setting: str, name: str) -> None:
    path = tmp_path / "theirs.toml"
    settings = {"model": "glyph-small", "loss": "clip", setting: "evil:thing"}
    path.write_text("".join(f'{key} = "{value}"\n' for key, value in settings.items()))
    code, out = command(name, "--config", str(path))
    assert code == 2
    assert out.startswith(
        f"megabatch {name}: {path}: {setting} = 'evil:thing' would run code, for which "
        "only the command line may ask; --trust allows it if you trust this file\n"
    )
    with pytest.raises(UsageError, match=r"theirs\.toml: .* = 'evil:thing' would run code"):
        load_config(path)
    assert getattr(load_config(path, trust=True), setting) == "evil:thing"


@pytest.mark.usefixtures("malicious")
def test_an_option_replaces_the_code_that_a_configuration_names_and_with_trust_it_may(
    mine: Path, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "theirs.toml"
    path.write_text('model = "glyph-small"\nloss = "evil:thing"\n')
    code, out = command("plan", "--config", str(path), "--loss", "clip")
    assert (code, "fits" in out) == (0, True), out
    path.write_text('model = "mine:towers"\nloss = "mine:FocalClipLoss"\n')
    code, out = command("plan", "--config", str(path), "--trust")
    assert (code, "fits without mine:FocalClipLoss" in out) == (0, True), out


@pytest.mark.parametrize("setting", ["loss", "model"])
@pytest.mark.usefixtures("malicious")
def test_a_runs_folder_may_not(
    command: Command, tmp_path: Path, pictures: Path, setting: str
) -> None:
    assert command("train", "--model", "glyph-small")[0] == 0
    run = tmp_path / "run"
    config = run / "config.toml"
    changed = re.sub(
        rf'^{setting} = ".*"', f'{setting} = "evil:thing"', config.read_text(), flags=re.M
    )
    config.write_text(changed)
    code, out = command("train", "--resume", "--steps", "4")
    assert code == 2
    assert f"{config}: {setting} = 'evil:thing' would run code, " in out
    # The folder's settings are compared only.
    code, out = command("train", "--model", "glyph-small", "--loss", "clip", "--resume")
    assert (code, f"--{setting} was evil:thing, is " in out) == (2, True)
    if setting == "loss":  # of which an evaluation has no need
        assert open_run(run).towers.name == "glyph-small"
        return
    code, out = command("export", str(run), "--to", "openclip", "--output", str(tmp_path / "out"))
    assert (code, f"{config}: model = 'evil:thing' would run" in out) == (2, True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=r"config\.toml: model = 'evil:thing' would run code"):
        evaluate_run(run, val_data=str(pictures))
