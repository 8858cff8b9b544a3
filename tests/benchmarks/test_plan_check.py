"""The check of plans against measured steps."""

import pytest
import torch

import plan_check
from tests.benchmarks.test_scripts import SCRIPTS

RESULTS = SCRIPTS / "results"


@pytest.fixture(autouse=True, scope="module")
def _planned_once():
    """The plan of the step of a million pairs, for all tests: it takes seconds."""
    plan = next(plan_check.measured(RESULTS / "icons-1m.json")).plan()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_check.Measured, "plan", lambda _: plan)
        yield


@pytest.mark.skipif(
    torch.__version__ < "2.10" and not torch.cuda.is_available(),
    reason="torch 2.9 counts for the CPU where there is no GPU",
)
def test_a_step_of_a_million_pairs_is_within_the_limits(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["plan_check.py", "icons-1m.json"])
    with pytest.raises(SystemExit) as ended:
        plan_check.main()
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "1,048,576 pairs on 1" in out
    assert "1 steps of 1 configurations, 1 models on 1 GPUs; 0 calibrate; 0 beyond" in out


def test_a_deviation_ends_with_1(monkeypatch, capsys):
    one = next(plan_check.measured(RESULTS / "icons-1m.json"))
    line, good = plan_check.compared(plan_check.replace(one, peak=2 * one.peak))
    assert not good
    assert line.endswith("BEYOND")
    monkeypatch.setattr(plan_check, "compared", lambda _: (line, False))
    monkeypatch.setattr("sys.argv", ["plan_check.py", "icons-1m.json"])
    with pytest.raises(SystemExit) as ended:
        plan_check.main()
    assert ended.value.code == 1
    assert "1 beyond 7% of memory or 12% of time" in capsys.readouterr().out


def test_a_step_without_a_whole_time_is_judged_by_its_memory():
    record = {"model": plan_check.ICONS, "b": 256, "n_devices": 1, "micro_batch_size": 64}
    record |= {"device": "NVIDIA H200", "peak_bytes": 1 << 30}
    times = [(1.0, False), (1.0, True), (None, False)]
    whole, extrapolated, without = (
        plan_check.paper({**record, "seconds": seconds, "extrapolated": extrapolated})
        for seconds, extrapolated in times
    )
    assert (whole.judged, extrapolated.judged, without.judged) == (True, False, False)
    assert "no time" in plan_check.compared(without)[0]
    assert "1.000 s" in plan_check.compared(extrapolated)[0]


def test_texts_are_divided_as_in_the_run():
    samples = {"text": [3, 30, 9, 20]}
    rows, tokens = (
        plan_check.texts_of({"equal_tokens": equal, "kept_micro_batches": 2}, samples)
        for equal in (False, True)
    )
    assert rows.widths("text", 77, rows=400, count=2) == ((32 + 16) / 2, 32)
    most = 229 * 24  # beside 171 texts of 32 tokens
    assert tokens.widths("text", 77, rows=400, count=2) == ((171 * 32 + most) / 400, most / 200)
    assert rows.longer("text", 77, rows=400, count=2) == 1 + (77 / 32 - 1) / 2
