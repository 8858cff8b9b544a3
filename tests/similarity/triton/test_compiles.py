"""Kernels compile, and their registers and shared memory stay within bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

triton = pytest.importorskip("triton")

#: Bytes of shared memory of a multiprocessor, and those reserved for each program.
H100, A100, SMALLEST, RESERVED = 228 << 10, 164 << 10, 99 << 10, 1 << 10


class Bounds(NamedTuple):
    """How many programs fit into how much shared memory; bytes of spilled registers of a thread."""

    programs: int = 1
    shared: int = H100
    stack: int | None = None


PAIR = Bounds(2, H100, 64)
BOUNDS = {
    **dict.fromkeys(("sigmoid@90", "sigmoid, ids@90", "clip@90", "clip, half@90"), PAIR),
    **dict.fromkeys(("clip, ds@90", "clip, ds, half@90", "clip, guided@90"), PAIR),
    "clip, guided, ds@90": PAIR,
    **dict.fromkeys(("clip@80", "clip, ds@80"), Bounds(2, A100, 256)),  # 4 warps: 544 to 912
    "targets@90": Bounds(1, H100, 384),  # at most 128 of them outside of the branch with masks
    "targets, ds@90": Bounds(1, H100, 128),
    "targets, small@80": Bounds(1, SMALLEST + RESERVED),  # sm_86 and sm_89
    **dict.fromkeys(("sigmoid, masked@90", "combine@90", "guided, masked ds@90"), Bounds()),
    **dict.fromkeys(
        ("pairs@90", "pairs, gradients@90", "scale rows@90", "targets, combine@90"), Bounds()
    ),
}
ATTENTION = ("short attention", "short attention, gradients")
ATTENTION += ("texts' attention", "texts' attention, gradients")
ATTENTION += ("attention", "attention of queries", "attention of keys")
BOUNDS |= {
    f"{name}@{capability}": Bounds(1, SMALLEST, 0) for name in ATTENTION for capability in (80, 90)
}
BOUNDS["attention of keys@80"] = Bounds(1, SMALLEST, 64)  # 56 by Triton 3.5, 48 by 3.8
if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6):  # Gluon differs before
    BOUNDS |= dict.fromkeys(("clip, hopper@90", "clip, ds, hopper@90"), Bounds(1, H100, 0))


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    """Resources of each kernel, from one program, since starting one takes seconds."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.similarity.triton.compiling", *BOUNDS]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", BOUNDS)
def test_a_kernels_resources(name: str, compiled: dict[str, dict[str, int]]) -> None:
    taken, bounds = compiled[name], BOUNDS[name]
    assert bounds.programs * (taken["shared"] + RESERVED) <= bounds.shared, taken
    if bounds.stack is not None:
        assert taken.get("stack", 0) <= bounds.stack, taken
