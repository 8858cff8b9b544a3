"""Markdown tables from the records of throughput.py, towers.py and retriever.py.

    python benchmarks/speed_tables.py benchmarks/results/throughput.json ...

Of several records of a contender at one size with different micro-batches, the table has the one of
`--micro-batch-size` for OpenCLIP's loop, and the best one beside it; for this trainer the best.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

#: This trainer's contender beside OpenCLIP's, compiled and eager.
MODES = (("megabatch", "openclip-compiled"), ("megabatch-eager", "openclip"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--micro-batch-size", type=int, default=512)
    options = parser.parse_args()
    for path in options.records:
        found = [
            r for r in json.loads(path.read_text())["records"] if r.get("status", "ok") == "ok"
        ]
        for table in tables(found, options.micro_batch_size):
            print("\n".join(table), end="\n\n")


def tables(found: list[Record], micro: int) -> Iterator[list[str]]:
    """The tables of one file's records."""
    if all("mini_batch_size" in record for record in found):
        yield retrievers(found)
    elif all("compiled" in record for record in found):
        yield towers(found)
    else:
        yield steps([r for r in found if r["n_devices"] == 1], micro)
        if any(r["n_devices"] > 1 for r in found):
            yield several_gpus(found)
        if any(r["parts"] for r in found):
            yield parts(found)


def steps(found: list[Record], micro: int) -> list[str]:
    """Pairs a second of this trainer beside OpenCLIP's loop."""
    rows = []
    for (model, b), group in grouped(found, "model", "b"):
        for ours, theirs in MODES:
            mine, best = (fastest(group, name) for name in (ours, theirs))
            usual = fastest([r for r in group if r["micro_batch_size"] == min(micro, b)], theirs)
            if mine is None or usual is None or best is None:
                continue
            rate, other = mine["pairs_a_second"], usual["pairs_a_second"]
            rows.append(
                (
                    f"{model}, {b:,}, {'eager' if ours.endswith('eager') else 'compiled'}",
                    f"{rate:,.0f} ({mine['micro_batch_size']:,})",
                    f"{other:,.0f}",
                    f"{rate / other:.2f}",
                    f"{best['pairs_a_second']:,.0f} ({best['micro_batch_size']:,})",
                    f"{gib(mine)}, {gib(usual)}",
                )
            )
    head = (
        "batch",
        "megabatch (rows at a time)",
        f"OpenCLIP's loop, {micro}",
        "times",
    )
    return markdown((*head, "its best (rows)", "peak, GiB"), rows)


def several_gpus(found: list[Record]) -> list[str]:
    """Pairs a second over the number of GPUs, and the share of ideal."""
    rows = []
    for (contender, model, b), group in grouped(found, "contender", "model", "b"):
        alone = fastest([r for r in group if r["n_devices"] == 1], contender)
        for n in sorted({r["n_devices"] for r in group}):
            best = fastest([r for r in group if r["n_devices"] == n], contender)
            assert best is not None
            share = best["pairs_a_second"] / n / alone["pairs_a_second"] if alone else None
            rows.append(
                (
                    f"{contender}, {model}, {b:,}",
                    str(n),
                    f"{best['pairs_a_second']:,.0f}",
                    "" if share is None else f"{share:.1%}",
                    gib(best),
                )
            )
    return markdown(("batch", "GPUs", "pairs/s", "of ideal", "peak, GiB"), rows)


def parts(found: list[Record]) -> list[str]:
    """The parts of a step, in milliseconds and as shares."""
    split = [record for record in found if record["parts"]]
    names = list(dict.fromkeys(itertools.chain.from_iterable(r["parts"] for r in split)))
    rows = []
    for name in names:
        cells = [name]
        for record in split:
            took, whole = record["parts"].get(name, 0.0), sum(record["parts"].values())
            cells.append(f"{1e3 * took:,.1f} ms, {took / whole:.1%}")
        rows.append(tuple(cells))
    heads = [f"{r['contender']}, {r['model']}, {r['b']:,}" for r in split]
    return markdown(("part", *heads), rows)


def towers(found: list[Record]) -> list[str]:
    """Pairs a second of the towers alone."""
    rows = []
    for (model, b, tokens, name), group in grouped(found, "model", "b", "tokens", "contender"):
        rates = {r["compiled"]: f"{r['pairs_a_second']:,.0f}" for r in group}
        what = f"{model}, {b:,} rows, texts of {tokens}, {name}"
        rows.append((what, rates.get(False, ""), rates.get(True, "")))
    return markdown(("towers alone, pairs/s", "eager", "compiled"), rows)


def retrievers(found: list[Record]) -> list[str]:
    """This library's loss beside sentence-transformers'."""
    first = found[0]
    rows = [
        (
            r["contender"],
            f"{r['seconds']:.2f}",
            f"{r['pairs_a_second']:,.0f}",
            f"{r['pairs_a_second'] / first['pairs_a_second']:.2f}",
            f"{r['extra_bytes'] / 2**30:.1f}",
        )
        for r in found
    ]
    size = f"{first['model']}, {first['b']:,} pairs"
    return markdown((size, "seconds a step", "pairs/s", "times", "memory, GiB"), rows)


def grouped(found: list[Record], *names: str) -> Iterator[tuple[tuple[Any, ...], list[Record]]]:
    """Records with equal values of these fields, in the order in which they first occur."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in found:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    yield from groups.items()


def fastest(found: Sequence[Record], contender: str) -> Record | None:
    """A contender's record with the most pairs a second, if it has any."""
    own = [r for r in found if r["contender"] == contender and r["pairs_a_second"]]
    return max(own, key=lambda r: float(r["pairs_a_second"]), default=None)


def gib(record: Record) -> str:
    """A record's peak of memory; "-" if it was not measured."""
    return "-" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 2**30:.1f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table's lines."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    main()
