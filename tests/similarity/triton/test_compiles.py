"""Kernels compile, and their registers and shared memory stay within bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SIGMOID = ("sigmoid@90", "sigmoid, ids@90", "sigmoid, masked@90", "sigmoid@80")
SIGMOID += ("defer@90", "write deferred@90")
SOFTMAX = ("clip@90", "clip, half@90", "clip, ds@90", "clip, ds, half@90", "combine, half@90")
SOFTMAX += ("clip, guided@90", "clip, guided, ds@90", "guided, combine@90", "guided, masked ds@90")
SOFTMAX += (
    "merge@90",
    "pairs@90",
    "pairs, gradients@90",
    "clip@80",
    "clip, half@80",
    "clip, ds@80",
    "clip, ds, half@80",
)
RANKS = ("find@90", "count@90", "count, ids@90", "count@80", "scores@90", "scores@80")
SOFT_TARGETS = ("targets@90", "targets, masked@90", "targets, ds@90", "targets, masked ds@90")
SOFT_TARGETS += ("targets, float32@90", "targets, small@80")
Resources = dict[str, dict[str, int]]
#: Bytes of shared memory of a multiprocessor of an H100, and those reserved for each program.
SHARED, RESERVED = 228 << 10, 1 << 10


@pytest.fixture(scope="module")
def compiled() -> Resources:
    """Resources of each kernel, from one program, since starting one takes seconds."""
    kernels = (*SIGMOID, *RANKS, *SOFTMAX, *SOFT_TARGETS)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.similarity.triton.compiling", *kernels]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: Resources = json.loads(ended.stdout.splitlines()[-1])
    assert set(found) == set(kernels)
    return found


def test_the_sigmoid_kernels(compiled: Resources) -> None:
    for name in ("sigmoid@90", "sigmoid, ids@90"):  # two programs share a multiprocessor
        taken = compiled[name]
        assert 2 * (taken["shared"] + RESERVED) <= SHARED, taken
        assert taken.get("stack", 0) <= 64, taken  # bytes of spilled registers
    assert compiled["sigmoid, masked@90"]["shared"] + RESERVED <= SHARED


def test_the_ranks_kernel(compiled: Resources) -> None:
    for name in RANKS:
        taken = compiled[name]
        assert 2 * (taken["shared"] + RESERVED) <= (SHARED if name.endswith("90") else 164 << 10)
        assert taken.get("stack", 0) <= (64 if name.endswith("90") else 512), (name, taken)


def test_the_softmax_kernels(compiled: Resources) -> None:
    for name in SOFTMAX:
        taken = compiled[name]
        limit = SHARED if name.endswith("90") else 164 << 10
        programs = 2 if name.startswith("clip") else 1  # share a multiprocessor
        assert programs * (taken["shared"] + RESERVED) <= limit, (name, taken)
        if name.startswith("clip"):  # bytes of spilled registers; 4 warps on sm_80: 544 to 912
            assert taken.get("stack", 0) <= (64 if name.endswith("90") else 256), (name, taken)


def test_the_kernels_of_soft_targets(compiled: Resources) -> None:
    for name in SOFT_TARGETS:
        # The smallest of those that kernels are for: 99 KiB, of sm_86 and sm_89.
        limit = 227 << 10 if name.endswith("90") else 99 << 10
        assert compiled[name]["shared"] <= limit, (name, compiled[name])
    assert compiled["targets@90"].get("stack", 0) <= 256
    assert compiled["targets, ds@90"].get("stack", 0) <= 128
