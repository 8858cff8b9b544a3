from __future__ import annotations

import functools
import json
import random
import socket
import time
from pathlib import Path

import psutil
import pytest
import torch

import scaling as script
from machinery import ranks, scaling
from machinery.inputs import Case, features
from machinery.parallel import PARALLEL, shard
from machinery.ranks import Team
from machinery.scaling import ScalingRecord, ScalingResult, Trial
from tests import programs
from tests.benchmarks.test_scripts import SCRIPTS, run

running = functools.partial(psutil.process_iter, ["cmdline"])
CASE = Case("clip", "megabatch", "cpu", "float32", b=1000, d=10, scale=14.3)


def made(n: int, ms: float, rate: float = 1e12, b: int = 1000) -> ScalingRecord:
    result = ScalingResult("ok", "", (ms,), (rate,), 100, 0.1, host_ms=1.0)
    return scaling.record(Trial(Case(**{**vars(CASE), "b": b}), n), result)


def test_fractions_of_ideal() -> None:
    # On two devices in 60% of the time, each 10% slower than the one alone.
    found = scaling.compare([made(1, 10.0), made(2, 6.0, rate=0.9e12), made(2, 21.0, b=2000)])
    assert found[0].of_ideal == 1
    assert found[1].of_ideal == pytest.approx(10 / 12)
    assert found[1].of_ideal_at_rate == pytest.approx(10 / 12 / 0.9)
    assert found[1].of_ideal_weak is None
    # Twice the rows on twice the devices: four times the work, twice the time would be ideal.
    assert found[2].of_ideal is None
    assert found[2].of_ideal_weak == pytest.approx(20 / 21)


def test_one_device_is_all_of_them_each_alone_at_their_mean_rate() -> None:
    def result(*times: float) -> ScalingResult:
        mean = sum(times) / len(times)
        rates, more = (1e12,), {"queued_ms": mean / 2, "host_ms": mean / 4}
        return ScalingResult("ok", "", times, rates, int(mean), device_ms=(mean,), **more)

    fast, slow = result(10.0, 14.0), result(30.0, 42.0, 36.0)  # 36: one call more in its time
    found = scaling.alone([fast, slow])
    assert list(found.times_ms) == pytest.approx([15, 21])
    assert found.device_ms == (12, 36)
    assert found.extra_bytes == 36
    assert found.queued_ms == pytest.approx(9)
    assert found.host_ms == 9
    assert list(found.product_rates) == [1e12, 1e12]
    failed = ScalingResult("failed", "out of luck")
    assert scaling.alone([fast, failed]) == failed
    assert scaling.alone([fast]) == fast


def test_shards_are_the_rows_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from machinery import inputs, parallel

    for module in (inputs, parallel):
        monkeypatch.setattr(module, "PERIOD", 12)
    case = Case(**{**vars(CASE), "b": 40})
    whole = features(40, 10, torch.float32, "cpu")
    for rank in range(4):
        for side, rows in zip(shard(case, Team(rank, 4, None, None)), whole, strict=True):
            assert torch.equal(side, rows[10 * rank : 10 * rank + 10])


def test_all_trials_have_a_contender_and_a_size() -> None:
    cases = [trial.case for trial in script.plan([1, 2, 4, 8], smallest=False)]
    for b in (16_384, 65_536, 262_144, 1_048_576):
        assert sum((case.b, case.contender) == (b, "megabatch") for case in cases) >= 4
    assert sum(case.b == 4_194_304 for case in cases) == 1
    known = {(loss, name) for loss, contenders in PARALLEL.items() for name in contenders}
    assert {(case.loss, case.contender) for case in cases} == known


def _number(contender: str, n: int) -> int:
    """Of CLIP's trial with 48 pairs."""
    wanted = ("clip", contender, 48, n)
    trials = script.plan([1, 2], smallest=True)
    found = [(one.case.loss, one.case.contender, one.case.b, one.n) for one in trials]
    return found.index(wanted)


@pytest.mark.concurrency
def test_a_run_is_measured_recorded_and_plotted(tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    # 48 pairs on 1 and 2 processes; without transfers; peers.
    wanted = [("megabatch", 1), ("megabatch", 2), ("megabatch-no-transfers", 2)]
    wanted += [("openclip", 2), ("disco-clip", 2)]
    only = [f"--only={_number(name, n)}" for name, n in wanted]
    run("scaling.py", "--smallest", "--gpus=1,2", *only, f"--output={output}")
    records = json.loads(output.read_text())["records"]
    by = {(r["loss"], r["contender"], r["n_devices"]): r for r in records}
    ours, alone = by["clip", "megabatch", 2], by["clip", "megabatch", 1]
    assert ours["status"] == alone["status"] == "ok"
    assert ours["of_ideal"] == pytest.approx(alone["ms"] / 2 / ours["ms"])
    assert ours["max_row_error"] < 1e-2
    assert ours["scale_gradient_error"] < 1e-2
    assert ours["host_ms"] > 0
    assert [len(r["device_ms"]) for r in (alone, ours)] == [2, 2]
    assert by["clip", "megabatch-no-transfers", 2]["ms"] > 0
    for peer in ("openclip", "disco-clip"):
        assert by["clip", peer, 2]["status"] == "ok"
        assert by["clip", peer, 2]["scale_gradient_error"] < 1e-2
    run("plots.py", str(output), "--width=16")
    assert (tmp_path / "s.png").exists()


FAILING = f"""
import os
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from machinery import ranks
if len(sys.argv) == 1:
    ranks.start_others(3, [sys.executable, __file__, "other"])
teams = ranks.join("cpu", [1, 3])
team = teams[3]
assert team.all_gather(team.rank) == [0, 1, 2] and team.broadcast(team.rank) == 0
os.write(2, f"rank {{team.rank}} is here\\n".encode())  # at once: print's parts may mingle
try:
    if team.rank == 2:
        raise ValueError("of its own")
    team.barrier()
except ValueError as error:
    ranks.give_up(error)
"""


def test_a_process_that_fails_ends_all_others(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    begun = time.monotonic()
    ended = programs.run([str(script)])
    assert ended.returncode == 1
    assert "rank 0 is here" in ended.stderr
    assert "rank 2: ValueError: of its own" in ended.stderr
    assert time.monotonic() - begun < 60
    while any(str(script) in (other.info["cmdline"] or []) for other in running()):
        time.sleep(0.1)


def test_a_port_where_somebody_listens_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ranks.free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(ports))
        assert ranks.free_port() == free
