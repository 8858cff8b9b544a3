"""The plan before a run's first step."""

import shlex

import pytest
import torch

from megabatch import cli
from megabatch.planning import Machine, plan

pytestmark = pytest.mark.usefixtures("counted_once")

SHORT = (
    "train --model glyph-small --train-data glyphs --device cpu "
    "--global-batch-size 64 --micro-batch-size 32 --steps 1"
)


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Start a run on a machine with this much free; (exit code, stdout, stderr, begun or not)."""

    def start(limit, options=""):
        def machine(device, count):
            assert (device, count) == (torch.device("cpu"), 1)
            return Machine("cpu", 1, limit)

        monkeypatch.setattr("megabatch.training.run.this_machine", machine)
        code = cli.main([*shlex.split(f"{SHORT} {options}"), "--output", str(tmp_path / "run")])
        return code, *capsys.readouterr(), (tmp_path / "run/metrics.jsonl").exists()

    return start


def test_what_cannot_fit_is_refused_with_a_suggestion_before_anything_is_written(train):
    code, out, err, begun = train(1 << 26, "--plan refuse")
    assert (code, begun) == (2, False)
    assert "optimizer state" in out
    assert "does not fit" in err
    assert "--plan warn" in err


@pytest.mark.parametrize(("options", "told"), [("", True), ("--plan off", False)])
def test_on_the_cpu_it_is_a_warning_unless_asked_for(train, options, told):
    code, out, _, begun = train(1 << 26, options)
    assert (code, begun) == (0, True)
    assert ("does not fit" in out) == ("second pass" in out) == told
    assert not told or out.index("second pass") < out.index("1 step of 64 pairs")


def test_a_model_that_cannot_be_counted_is_trained_all_the_same(train, monkeypatch):
    def fail(*_):
        raise RuntimeError("data-dependent output")

    monkeypatch.setattr(plan, "measure", fail)
    code, out, _, begun = train(1 << 40)
    assert (code, begun) == (0, True)
    assert "glyph-small cannot be planned: data-dependent output" in out
