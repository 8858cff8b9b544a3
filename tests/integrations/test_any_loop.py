"""The loops of docs/integrations/any-loop.md give the same results on one process and on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.test_distributed_docs import losses

PAGE = "docs/integrations/any-loop.md"
END = "import time\n\ndist.destroy_process_group()\ntime.sleep(0.1)\n"


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "fully_shard"])
def test_the_loops_give_the_same_on_two_processes_as_on_one(wrapper: str, tmp_path: Path) -> None:
    setup, *loops, report = blocks(PAGE, "python")
    (loop,) = (code for code in loops if f"import {wrapper}" in code)
    script = tmp_path / "loop.py"
    script.write_text(setup + loop + report + END)
    alone, both = losses(script, 1), losses(script, 2)
    assert sorted(both) == [0, 1]
    assert both[0] == both[1]
    assert abs(both[0] - alone[0]) < 1e-4
    assert alone[0] < 3  # the loss is 9 at the start
