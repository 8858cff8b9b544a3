"""The training loop that docs/distributed.md shows: the same on one process and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/distributed.md"


def losses(*command: str) -> dict[int, float]:
    environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert ended.returncode == 0, ended.stderr
    lines = re.findall(r"rank (\d+): ([\d.]+)", ended.stdout)
    return {int(rank): float(loss) for rank, loss in lines}


def test_the_loop_gives_the_same_on_two_processes_as_on_one(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    script = tmp_path / "loop.py"
    script.write_text(code)
    alone = losses(sys.executable, str(script))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    both = losses(*torchrun, "--nproc-per-node=2", str(script))
    assert list(alone) == [0]
    assert sorted(both) == [0, 1]
    assert both[0] == both[1]
    assert abs(both[0] - alone[0]) < 1e-4
    assert alone[0] < 4  # it learns: at the start 9
