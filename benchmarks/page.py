"""Render the pages of results in docs/ from benchmarks/pages and the records in benchmarks/results.

    python benchmarks/page.py

The pages are Markdown with two additions. A fenced block ```table holds a table in TOML:

    records = ["single-gpu"]     files of benchmarks/results, also as patterns ("fuzz-*")
    from = "comparison"          the list in these files; "" is all of a file as one record
    where = {loss = "clip"}      fields that a record must have; a list: any of them; "*": any
                                 value; "=b": the value of the field b
    unless = {seed = 100}        fields that it may not have
    row = "{contender}"          the first cell of a line, as `str.format` fills it from a record
    head = "CLIP's loss"         the title of the first column
    columns = {time = "{ms:ms}"} titles and contents of the others; or instead
    column = "{b:,} pairs"       a title for each value, and
    cell = "{ms:ms}"             the contents below it
    several = "mean"             if several records share a cell: the mean and the standard
                                 deviation of their numbers; "first": the first; else an error
    sort = true                  lines in the order of their first numbers, not of the records

`UNITS` has the formats of numbers; `{record}` is the file's name. In the text,
`{{single-gpu: b=65536 loss="clip": {ms:ms}}}` is a figure of the first such record.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megabatch.benchmarking.records import digest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "benchmarks/pages"
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks/results"
PACKAGE = ROOT / "src/megabatch"

SOURCES_SAY = [
    "Each record holds its whole command. *Changed since* names the packages whose sources differ",
    "from the measured ones; records from before 2026-11-25 have no hash of their sources.",
    "Programs that are no longer in benchmarks/ went when their question was answered.",
]

Record = dict[str, Any]


# --- records --------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of a folder of records by name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        found[path.stem] = {"records": content} if isinstance(content, list) else content
    return found


def listed(content: Record, name: str, key: str = "records") -> list[Record]:
    """The records of a file, or its list `key`, with the file's name; "": all of it as one.

    A dotted key leads into nested objects; an object there is a list of its values.
    """
    found: Any = content if key else [content]
    for part in key.split(".") if key else ():
        found = found.get(part, {})
    found = list(found.values()) if isinstance(found, dict) else found
    return [{**record, "record": name} for record in found]


def origin(content: Mapping[str, Any]) -> str:
    """Machine, torch, and day of a file of records, as far as it says."""
    machine = place(content.get("machine"))
    torch = content.get("versions", {}).get("torch", "").partition("+")[0]
    days = [content.get("date"), *(record.get("date") for record in content.get("records", ()))]
    day = max((str(day)[:10] for day in days if day), default="")
    return ", ".join(part for part in (machine, torch and f"torch {torch}", day) if part)


def place(machine: Mapping[str, Any] | str | None) -> str:
    """A machine in a few words: its GPUs by kind, or else its CPU."""
    if machine is None or isinstance(machine, str):
        return machine or ""
    gpus = machine.get("gpus") or []
    kinds = [f"{gpus.count(kind)} x {kind}".removeprefix("1 x ") for kind in dict.fromkeys(gpus)]
    return ", ".join(kinds) or f"{machine.get('cpu', '')}, {machine.get('cores')} cores"


def commands(content: Mapping[str, Any]) -> list[str]:
    """The commands that wrote a file."""
    own = [content.get("command"), *content.get("commands", ())]
    each = own if any(own) else [record.get("command") for record in content.get("records", ())]
    return list(dict.fromkeys(command for command in each if command))


def matches(record: Record, where: Mapping[str, Any]) -> bool:
    """Whether a record was measured and has these values."""
    if record.get("status", "ok") not in ("ok", "wrong", where.get("status", "out of memory")):
        return False
    for field, wanted in where.items():
        value = record.get(field)
        if isinstance(wanted, str) and wanted.startswith("="):
            wanted = record.get(wanted[1:])
        allowed = wanted if isinstance(wanted, list) else [wanted]
        if not (value is not None if wanted == "*" else value in allowed):
            return False
    return True


# --- figures --------------------------------------------------------------------------------------


def digits(value: float) -> str:
    """Three significant digits, more before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def seconds(value: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{digits(value)} s" if value >= 0.9995 else f"{digits(1e3 * value)} ms"


def error(value: float) -> str:
    """A relative error in two digits."""
    if value == 0 or value >= 0.1:
        return f"{value:.2g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


#: Formats of numbers by name.
UNITS: dict[str, Callable[[Any], str]] = {
    "s": seconds,
    "ms": lambda value: seconds(value / 1e3),
    "GiB": lambda value: f"{digits(value / 2**30)} GiB",
    "MB": lambda value: f"{value / 1e6:.2f} MB",
    "%": lambda value: f"{value:.1%}",
    "error": error,
    "digits": digits,
    "yes": lambda value: "yes" if value else "no",
    "GPUs": lambda value: "1 GPU" if value == 1 else f"{value} GPUs",
}


class _Figures(string.Formatter):
    """`str.format` of a record, or of several at once."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        first, rest = re.match(r"([^\[]+)(.*)", field_name).groups()  # type: ignore[union-attr]
        values = []
        for record in kwargs["records"]:
            value = record.get(first)
            for key in re.findall(r"\[(.*?)\]", rest):
                if value is not None:
                    value = value[int(key)] if isinstance(value, list) else value.get(key)
            values.append(value)
        return values, first

    def format_field(self, value: list[Any], format_spec: str) -> str:
        figures = [one for one in value if one is not None]
        if not figures:
            return "-"
        shown = UNITS.get(format_spec, lambda one: format(one, format_spec))
        number = isinstance(figures[0], (int, float))
        if len(figures) == 1 or not number or min(figures) == max(figures):
            return shown(figures[0])
        mean, deviation = statistics.mean(figures), statistics.stdev(figures)
        if deviation > abs(mean) / 4:  # far from a normal distribution: some runs fail
            return ", ".join(shown(one) for one in sorted(figures))
        return f"{shown(mean)} ± {shown(deviation)}"


def fill(form: str, records: Sequence[Record]) -> str:
    """A format filled from records."""
    return _Figures().format(form, records=records)


def cell(form: str, records: Sequence[Record]) -> str:
    """The same for a cell of a table, which has the reason instead if there is no figure."""
    status = records[0].get("status", "ok")
    return status if status not in ("ok", "wrong") else fill(form, records)


# --- the pages ------------------------------------------------------------------------------------


def render(template: str, files: Mapping[str, Record]) -> str:
    """A page.

    Raises:
        ValueError: a table or figure finds no record, or several for a cell.
    """
    text = re.sub(r"```table\n(.*?)```", lambda m: table(m[1], files), template, flags=re.DOTALL)
    return re.sub(r"\{\{(.*?)\}\}(?!\})", lambda m: figure(m[1], files), text)


def figure(text: str, files: Mapping[str, Record]) -> str:
    """A figure in the text."""
    name, where, form = (part.strip() for part in text.split(":", 2))
    wanted = tomllib.loads("\n".join(re.findall(r"[\w-]+=(?:\"[^\"]*\"|\S+)", where)))
    records = listed(files[name], name, "records" if where else "")
    found = [record for record in records if matches(record, wanted)]
    if not found:
        raise ValueError(f"{text}: no record of {name} has these values")
    return fill(form, found[:1])


def table(text: str, files: Mapping[str, Record]) -> str:
    """A table and links to its records."""
    told = tomllib.loads(text)
    names = [name for form in told["records"] for name in files if fnmatchcase(name, form)]
    where, unless = told.get("where", {}), told.get("unless", {})
    rows: dict[str, dict[str, list[Record]]] = {}
    for name in names:
        for record in listed(files[name], name, told.get("from", "records")):
            if matches(record, where) and not (unless and matches(record, unless)):
                row = rows.setdefault(fill(told["row"], [record]), {})
                row.setdefault(fill(told.get("column", ""), [record]), []).append(record)
    if not rows:
        raise ValueError(f"no record for the table\n{text}")
    for row, cells in rows.items():
        for title, records in cells.items():
            if len(records) > 1 and "several" not in told:
                raise ValueError(f"{len(records)} records for {row}, {title} of the table\n{text}")
            cells[title] = records[:1] if told.get("several") == "first" else records
    if "column" in told:
        titles = dict.fromkeys(title for cells in rows.values() for title in cells)
        titles = sorted(titles, key=_number)
        forms = [(title, told["cell"]) for title in titles]
    else:
        titles, forms = list(told["columns"]), [("", form) for form in told["columns"].values()]
    lines = [[told.get("head", " "), *titles], ["---"] * (1 + len(titles))]
    shown = sorted(rows, key=_number) if told.get("sort") else rows
    for row, cells in ((row, rows[row]) for row in shown):
        lines.append([row, *(cell(form, cells[t]) if t in cells else "-" for t, form in forms)])
    links = ", ".join(f"[{name}](../benchmarks/results/{name}.json)" for name in names)
    body = [f"|{'|'.join(line)}|" for line in lines]
    return "\n".join([*body, "", f"Records: {links}."])


def _number(title: str) -> float:
    """The first number in a title; 0 leaves the order as it is."""
    found = re.search(r"\d[\d,]*", title)
    return float(found[0].replace(",", "")) if found else 0


def sources(files: Mapping[str, Record]) -> str:
    """The machine, the day and the program of each file of records."""
    lines = ["## Records", "", *SOURCES_SAY, ""]
    for name, content in files.items():
        programs = [re.findall(r"\w+\.py|^megabatch \w+", line) for line in commands(content)]
        link = f"[{name}](../benchmarks/results/{name}.json)"
        shown = [origin(content), *dict.fromkeys(f"`{found[0]}`" for found in programs if found)]
        changed = [p for p, old in content.get("sources", {}).items() if old != digest(PACKAGE / p)]
        if changed:
            shown.append(f"*changed since: {', '.join(changed)}*")
        lines.append(f"- {link}: {', '.join(filter(None, shown)) or 'a script that was not kept'}")
    return "\n".join(lines)


def pages(files: Mapping[str, Record]) -> dict[Path, str]:
    """The pages by their paths."""
    texts = {p.name: render(p.read_text("utf-8"), files) for p in sorted(PAGES.glob("*.md"))}
    texts["appendix.md"] += f"\n{sources(files)}\n"
    return {DOCS / name: text for name, text in texts.items()}


def unmarked(text: str) -> str:
    """A page without the marks of changed sources, which each commit may change."""
    return re.sub(r", \*changed since: .*\*", "", text)


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description="Render the pages of results from the records.")
    parser.add_argument("--check", action="store_true", help="fail if a page is not up to date")
    check = parser.parse_args().check
    for path, text in pages(read(RESULTS)).items():
        if not check:
            path.write_text(text, "utf-8")
        elif unmarked(text) != unmarked(path.read_text("utf-8")):
            sys.exit(f"{path}: not up to date: python benchmarks/page.py writes it")


if __name__ == "__main__":
    main()
