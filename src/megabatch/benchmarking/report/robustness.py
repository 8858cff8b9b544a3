"""Random calls, test runs, kills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megabatch.benchmarking.report.page import Answer, Part, Section
from megabatch.benchmarking.report.record_files import RecordFile
from megabatch.benchmarking.report.tables import count, grouped, markdown, seconds


def random_calls(files: Sequence[RecordFile]) -> Iterator[str]:
    """Random calls by dtype and number of ranks."""
    rows = []
    for file in files:
        content = file.content
        place = "a GPU" if file.content["machine"].get("gpus") else "CPU"
        dtypes = sorted({r["dtype"] for r in file.records})
        ranks = sorted({r["ranks"] for r in file.records})
        rows.append(
            (
                f"{place}, {', '.join(dtypes)}, ranks: {', '.join(map(str, ranks))}",
                count(len({r["call"] for r in file.records})),
                count(content["cases"]),
                count(content["failed"]),
                count(content["undecided"]),
            )
        )
    head = "", "losses and functions", "calls", "that differ", "undecided"
    yield from markdown(head, rows)


def versions(files: Sequence[RecordFile]) -> Iterator[str]:
    """The suite with each minor release of torch."""
    packages = "torch", "triton", "torchvision", "numpy"
    rows = [
        (
            *(r["versions"].get(name, "") for name in packages),
            *(count(r[name]) for name in ("passed", "failed", "skipped")),
            seconds(r["seconds"]),
        )
        for file in files
        for r in file.records
    ]
    yield from markdown((*packages, "passed", "failed", "skipped", "time"), rows)


def repeated(files: Sequence[RecordFile]) -> Iterator[str]:
    """Repeated runs of tests."""
    kinds = {
        "plain": "the suite",
        "loaded": "the suite under load, in random order, with other examples",
        "volatile": "tests with threads, processes, clocks or memory, in random order",
    }
    rows = []
    for file in files:
        for (kind,), runs in grouped(file.records, "kind"):
            passed = [r["passed"] for r in runs]
            span = count(min(passed))
            if max(passed) > min(passed):
                span += f" to {count(max(passed))}"
            failed = count(sum(r["failed"] for r in runs))
            rows.append((kinds.get(str(kind), str(kind)), count(len(runs)), span, failed))
    yield from markdown(("", "runs", "tests that passed in each", "failures in all runs"), rows)


def kills(files: Sequence[RecordFile]) -> Iterator[str]:
    """Trainings that are killed and resumed again and again."""
    rows = [
        (
            f"{r['steps']} steps, {r['parallel']}",
            count(r["kills"]),
            count(r["killed_while_saving"]),
            _yes(r["same_weights"]),
            _yes(r["same_order"]),
        )
        for file in files
        for r in file.measured
    ]
    head = "training", "killed", "while it saved a checkpoint", "same weights", "same samples"
    yield from markdown(head, rows)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def summary(cpu: RecordFile, gpu: RecordFile) -> str:
    """The summary's line."""
    failed = cpu.content["failed"] + gpu.content["failed"]
    return (
        f"{count(cpu.content['cases'])} random calls on the CPU and {count(gpu.content['cases'])} "
        f"on a GPU against dense expressions: {failed or 'none'} "
        f"{'differs' if failed in (0, 1) else 'differ'}"
    )


SECTION = Section(
    "How well is it tested?",
    (
        Part(
            "Random calls against dense expressions",
            ("fuzz-*",),
            random_calls,
            """In float64, values and all gradients agree to 1e-9 of each tensor's largest number;
            in lower precision the errors are at most four times those of the dense expression. A
            call is undecided if a logit lies within 1e-6 of a margin.""",
        ),
        Part(
            "Every minor release of torch",
            ("versions",),
            versions,
            """The first row has the oldest releases of all libraries that pyproject.toml allows,
            the others the newest.""",
        ),
        Part("Repeated runs of the tests", ("test-runs",), repeated),
        Part(
            "Killed and resumed",
            ("kill-resume",),
            kills,
            "By SIGKILL at random moments, compared with a run that nothing interrupted.",
        ),
    ),
    (Answer("Random calls", ("fuzz-cpu", "fuzz-gpu"), summary),),
)
