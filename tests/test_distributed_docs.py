"""The training loop that docs/distributed.md shows: the same on one process and on two."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.docs.pages import blocks
from tests.programs import Program
from tests.similarity.distributed.processes import new_store, torchrun_environment

PAGE = "docs/distributed.md"


def losses(script: Path, size: int) -> dict[int, float]:
    """Of a script on so many processes; they know of each other what torchrun's do."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    store = new_store()
    started = [
        Program([str(script)], environ | torchrun_environment(rank, size, store.port))
        for rank in range(size)
    ]
    found = {}
    for process in started:
        out, err = process.communicate(280)
        assert process.returncode == 0, err
        found |= {int(rank): float(loss) for rank, loss in re.findall(r"rank (\d+): ([\d.]+)", out)}
    return found


def test_the_loop_gives_the_same_on_two_processes_as_on_one(tmp_path: Path) -> None:
    code, *_ = blocks(PAGE, "python")
    script = tmp_path / "loop.py"
    script.write_text(code)
    alone, both = losses(script, 1), losses(script, 2)
    assert list(alone) == [0]
    assert sorted(both) == [0, 1]
    assert both[0] == both[1]
    assert abs(both[0] - alone[0]) < 1e-4
    assert alone[0] < 4  # it learns: at the start 9
