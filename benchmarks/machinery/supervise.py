"""Measure groups in a worker that may crash or hang; another worker then does the rest."""

from __future__ import annotations

import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypeVar

from machinery import group
from machinery.group import Group
from machinery.inputs import Case
from machinery.results import Result

T = TypeVar("T")

#: Starts a worker: (cases to skip, file for its stderr) -> process
Start = Callable[[Collection[int], IO[bytes]], "subprocess.Popen[bytes]"]


def supervise(
    groups: Sequence[Group], start: Start, log: Path, deadline: float, patience: float
) -> Iterator[tuple[Case, Result]]:
    """Yield the result of every case; see `supervise_cases`."""
    cases = [case for one in groups for case in one.cases]
    for case, found in supervise_cases(cases, start, log, deadline, patience):
        yield case, Result(**found)


def supervise_cases(
    cases: Sequence[T], start: Start, log: Path, deadline: float, patience: float
) -> Iterator[tuple[T, dict[str, Any]]]:
    """Yield the result of every case, as the fields of a `Result`.

    A case has failed if the worker dies, or is silent for `patience` seconds; the next worker skips
    it. At `deadline` (of time.time()) the worker is killed.
    """
    done: set[int] = set()
    while len(done) < len(cases) and time.time() < deadline:
        current: int | None = None
        with log.open("ab") as messages:
            worker = start(done, messages)
        try:
            for line in _lines(worker, deadline, patience):
                current = line["case"]
                if "result" in line:
                    done.add(current)
                    yield cases[current], line["result"]
            silent = worker.poll() is None
        finally:
            worker.kill()
            code = worker.wait()
        if time.time() >= deadline:
            break
        if current is None:  # it failed to start, as another one would
            raise RuntimeError(f"the worker ended with exit code {code}: {_last_line(log)}")
        if current not in done:
            done.add(current)
            note = f"no sign of life for {patience:.0f} s" if silent else _last_line(log)
            yield cases[current], {"status": "failed", "note": note or f"exit code {code}"}
    for i, case in enumerate(cases):
        if i not in done:
            yield case, {"status": "skipped", "note": "no time left"}


def work(groups: Sequence[Group], skip: Collection[int], deadline: float) -> None:
    """The worker: run the groups and print messages to stdout, a line each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' output goes to stderr
    gc.collect()
    gc.freeze()  # imported modules stay: looking through them takes time between contenders
    first = 0
    warm = False
    for one in groups:
        numbers = {case: first + i for i, case in enumerate(one.cases)}
        first += len(one.cases)
        left = tuple(case for case in one.cases if numbers[case] not in skip)
        if not left:
            continue
        if not warm:
            group.warm_up(one.case.device)
            warm = True
        for case, result in group.run(_with_cases(one, left), deadline):
            line: dict[str, Any] = {"case": numbers[case]}
            if result is not None:
                line["result"] = asdict(result)
            print(json.dumps(line), file=out, flush=True)


def _with_cases(one: Group, cases: tuple[Case, ...]) -> Group:
    return Group(cases, one.seconds, one.product_size, one.once, one.cost)


def _lines(
    worker: subprocess.Popen[bytes], deadline: float, patience: float
) -> Iterator[dict[str, Any]]:
    """The worker's messages, until it ends, is silent for too long, or the time is up."""
    assert worker.stdout is not None
    received: queue.Queue[bytes] = queue.Queue()

    def read(stream: IO[bytes]) -> None:
        for line in stream:
            received.put(line)
        received.put(b"")

    threading.Thread(target=read, args=(worker.stdout,), daemon=True).start()
    while True:
        try:
            line = received.get(timeout=max(0.0, min(patience, deadline - time.time())))
        except queue.Empty:
            return
        if not line:
            worker.wait()
            return
        yield json.loads(line)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def start_self(arguments: Sequence[str]) -> Start:
    """Start workers that run this script, with further arguments and the cases to skip."""

    def start(skip: Collection[int], messages: IO[bytes]) -> subprocess.Popen[bytes]:
        words = [sys.executable, *arguments, json.dumps(sorted(skip))]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=messages)

    return start
