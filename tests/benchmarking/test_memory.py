from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megabatch.benchmarking import memory

MIB = 2**20

# In a process of its own, started by one that has had more: its peak is not to be inherited.
SCRIPT = """
import torch
from megabatch.benchmarking.memory import at_most, extra_bytes, is_out_of_memory
kept = torch.ones(40 << 18)
def call():
    first = torch.ones(64 << 18)   # 64 MiB
    del first
    torch.ones(16 << 18)
print(extra_bytes(call, "cpu"))
with at_most(100 << 20):
    small = torch.ones(50 << 18)
    try:
        torch.ones(80 << 18)
    except RuntimeError as error:
        print("refused", is_out_of_memory(error))
torch.ones(80 << 18)
print("granted")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured and limited on Linux only")
def test_the_peak_above_what_was_there_and_a_limit_that_ends() -> None:
    torch.ones(512 << 18)
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    peak, *printed = ended.stdout.split()
    # Linux counts pages by core, and adds them up only now and then: 62.7 MiB on 32 cores.
    assert 60 * MIB < int(peak) < 72 * MIB
    assert printed == ["refused", "True", "granted"]


@pytest.mark.gpu
def test_peak_on_cuda() -> None:
    kept = torch.ones(1 << 20, device="cuda")
    assert memory.extra_bytes(lambda: torch.ones(64 << 18, device="cuda"), "cuda") == 64 * MIB
    assert kept.is_cuda
