"""Run the tests again and again, to see that none fails by chance.

    python tools/repeat_tests.py --plain 5 --loaded 5 --volatile 50 \\
        --output benchmarks/results/test-runs.json

Plain runs are those of `make test`. Loaded ones have a busy loop on each core, take the
tests in random order, and let Hypothesis draw other examples each time. Volatile ones take, in
random order as well, only the tests with threads, processes, clocks or memory in them (the marker
`concurrency`). Each run is added to the record when it ends: an interruption loses that run alone.
Exit code 1 if any test failed.

On a machine of many cores several of these commands run side by side, each with --cores of its own
and all with one --output:

    for i in 0 1 2 3; do
        python tools/repeat_tests.py --volatile 13 --cores $((2*i)) $((2*i+1)) --output runs.json &
    done

What follows -- goes to pytest, as in `... -- tests/similarity -x`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_runs import ARGUMENTS, Place, append, check_same, green, load, run


def main(words: Sequence[str] | None = None) -> int:
    """Run the tests as the options say; returns the exit code."""
    own = sys.argv[1:] if words is None else list(words)
    options = _options(own)
    if options.cores:
        os.sched_setaffinity(0, options.cores)
    place = Place()
    about = {"command": shlex.join(["python", "tools/repeat_tests.py", *own]), **place.describe()}
    if options.output.exists():  # better told now than after the first run
        check_same(options.output, json.loads(options.output.read_text()), about)
    bad = 0
    for kind, seed in _runs(options):
        arguments = [*_base(options.workers), *_of(kind, seed), *options.arguments]
        with load() if kind == "loaded" else contextlib.nullcontext():
            found = run(place, arguments, options.limit)
        record: dict[str, Any] = {"kind": kind, "seed": seed, **found}
        append(options.output, about, record)
        bad += not green(record)
        failed = "".join(f"\n  {failure['test']}" for failure in record["failures"])
        print(
            f"{kind}, seed {seed}: {record['passed']} passed, {record['failed']} failed, "
            f"{record['skipped']} skipped in {record['seconds']} s, exit code "
            f"{record['exit_code']}{failed}",
            flush=True,
        )
    return 1 if bad else 0


def _runs(options: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """Each run's kind and, if it has an order of its own, seed."""
    yield from [("plain", None)] * options.plain
    kinds = ["loaded"] * options.loaded + ["volatile"] * options.volatile
    yield from ((kind, options.seed + i) for i, kind in enumerate(kinds))


def _base(workers: str) -> list[str]:
    if workers == "auto":
        return list(ARGUMENTS)
    return ["-q"] if workers == "0" else ["-q", "-n", workers]


def _of(kind: str, seed: int | None) -> list[str]:
    """Arguments of a run of this kind."""
    if kind == "plain":
        return []
    random_order = ["--random-order-bucket=module", f"--random-order-seed={seed}"]
    examples = ["--hypothesis-profile=random", f"--hypothesis-seed={seed}"]
    return [*random_order, *examples, *(["-m", "concurrency"] if kind == "volatile" else [])]


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", type=int, default=0, metavar="N", help="runs as `make test`'s")
    parser.add_argument("--loaded", type=int, default=0, metavar="N", help="runs under load")
    parser.add_argument("--volatile", type=int, default=0, metavar="N", help="of some tests alone")
    parser.add_argument("--seed", type=int, help="of the first random order; default: any")
    parser.add_argument("--cores", type=int, nargs="+", default=[], help="to use; default: all")
    parser.add_argument("--workers", default="auto", help="of pytest-xdist; 0: do without it")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of a run")
    parser.add_argument("--output", type=Path, required=True, help="record to make or add to")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    options = parser.parse_args(words)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    absent = sorted(set(options.cores) - os.sched_getaffinity(0))
    if absent:
        parser.error(f"--cores: expected some of {sorted(os.sched_getaffinity(0))}, got {absent}")
    if min(options.plain, options.loaded, options.volatile) < 0:
        parser.error("--plain, --loaded, --volatile: expected no negative numbers")
    if options.loaded + options.volatile and importlib.util.find_spec("random_order") is None:
        parser.error("--loaded, --volatile: pytest-random-order is not installed")
    return options


if __name__ == "__main__":
    sys.exit(main())
