"""The loops of docs/integrations/any-loop.md give the same alone, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import blocks
from tests.test_distributed_docs import losses

PAGE = "docs/integrations/any-loop.md"
END = "import time\n\ndist.destroy_process_group()\ntime.sleep(0.1)\n"


def test_the_loop_of_one_process_learns_the_same_with_and_without_a_cache() -> None:
    setup, alone, *_ = blocks(PAGE, "python")
    cached: dict[str, Any] = {}
    exec(setup + alone, cached)
    assert cached["loss"].item() < 3  # 9 at the start
    plain: dict[str, Any] = {}
    without = alone.replace("step(images, texts)", "clip(*model(images, texts))")
    assert without != alone
    exec(setup + without, plain)
    torch.testing.assert_close(cached["loss"], plain["loss"])


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
