"""Settings for all tests."""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

from tests.concurrency import uses_concurrency

if TYPE_CHECKING:
    from tests.similarity.distributed.processes import Groups

if not torch.cuda.is_available():  # Triton's kernels then run on the CPU; read when it is imported
    os.environ["TRITON_INTERPRET"] = "1"
    from tests import interpreter

    interpreter.mend()

# Shells start commands in the background with SIGINT ignored, and Python leaves it ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, however long they take; tools/repeat_tests.py asks for others.
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("random", database=None, deadline=None)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """A test leaves the process as it found it, so that their order does not matter."""
    from tests import process_state  # which imports Triton

    before = process_state.now()
    yield
    left = process_state.differences(before)
    if left:
        process_state.restore(before)
    assert not left, f"this test left behind: {left}"


@pytest.fixture(autouse=True)
def _seeded(_as_found: None) -> None:
    # Without GPUs `torch.manual_seed` keeps stack traces for when there are some: 1 ms.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(scope="session")
def process_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    """Groups of processes for the checks of all modules."""
    from tests.similarity.distributed.processes import Groups

    groups = Groups(lambda: tmp_path_factory.mktemp("processes"))
    yield groups
    groups.end()


def pytest_configure(config: pytest.Config) -> None:
    """A cache folder of the tests' own, for all of pytest-xdist's workers and what tests start."""
    if not hasattr(config, "workerinput"):
        os.environ["MEGABATCH_CACHE"] = config.stash[_CACHE] = tempfile.mkdtemp()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more worker than there are cores: on two of them, two wait two fifths of the time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return int(os.getenv("PYTEST_XDIST_AUTO_NUM_WORKERS") or (cores or 1) + 1)


def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Workers share the server; without GPUs, they fork from it and need not import libraries."""
    from tests.server import SHARED, start_server

    os.environ[SHARED] = start_server()
    for spec in [] if torch.cuda.is_available() else specs:  # CUDA survives no fork
        spec.python = shlex.join([sys.executable, str(Path(__file__).with_name("server.py"))])


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


_CACHE = pytest.StashKey[str]()


def pytest_collection() -> None:
    gc.disable()
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # timm would import it: a second


def pytest_collection_finish() -> None:
    """What is imported by now stays: looking through it takes half a second each time."""
    if sys.modules.get("wandb", ...) is None:
        del sys.modules["wandb"]
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries remark on what outlives the interpreter
    gc.enable()


#: Files that take long. They begin first: none of them then runs on while other workers idle.
LONGEST = (
    "examples/test_examples.py",
    "benchmarks/test_scripts.py",
    "benchmarks/machinery/test_scaling.py",
    "training/test_run_parallel.py",
    "losses/test_everywhere.py",
    "training/test_parallel.py",
    "integrations/test_sentence_transformers_training.py",
    "training/test_plan_command.py",
    "planning/test_plan.py",
    "similarity/triton/test_softmax.py",
    "similarity/test_edges.py",
    "similarity/distributed/test_fuzz.py",
    "similarity/triton/test_compiles.py",
)


def _place(item: pytest.Item) -> int:
    """The place of a test's file in the order in which workers take files."""
    name = item.nodeid.partition("::")[0].removeprefix("tests/")
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device")
    items.sort(key=_place)
    for item in items:
        # The kernels' tests run on a GPU where there is one: `make test-gpu` takes them along.
        if torch.cuda.is_available() and "similarity/triton" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
        if uses_concurrency(item.path):
            item.add_marker(pytest.mark.concurrency)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
