"""A page of sections and parts, rendered from a folder of record files."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megabatch.benchmarking.report.record_files import RecordFile
from megabatch.benchmarking.report.tables import markdown
from megabatch.errors import UsageError

Files = Mapping[str, RecordFile]


@dataclass(frozen=True)
class Part:
    """A table with its text and the record files that it is made of.

    Args:
        title: its heading.
        files: names of record files, also as patterns ("fuzz-*"). The part is on the page if at
            least one exists; their commands follow at the section's end.
        show: from the files that exist, in this order, to lines of Markdown; no line: no part.
        text: what was measured and how.
        figures: (file name or pattern, description) of pictures next to the records, if they exist.
    """

    title: str
    files: tuple[str, ...]
    show: Callable[[Sequence[RecordFile]], Iterable[str]]
    text: str = ""
    figures: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Answer:
    """A line of the summary: from the named files, all of which must exist, to a short answer."""

    question: str
    files: tuple[str, ...]
    show: Callable[..., str]


@dataclass(frozen=True)
class Section:
    """Parts that answer one question; absent as long as no part has a record."""

    title: str
    parts: tuple[Part, ...]
    answers: tuple[Answer, ...] = ()
    text: str = ""


def render(files: Files, folder: Path, sections: Sequence[Section], introduction: str) -> str:
    """The page; links to records and figures are relative to the folder that will hold it.

    Raises:
        UsageError: a record lacks a field that its table needs.
    """
    known: set[str] = set()
    body: list[str] = []
    answers: list[tuple[str, str]] = []
    for section in sections:
        used: dict[str, RecordFile] = {}
        parts = [line for part in section.parts for line in _part(part, files, folder, used)]
        if parts:
            sources = [line for file in used.values() for line in _source(file, folder)]
            body += [f"## {section.title}", "", *_prose(section.text), *parts]
            body += ["Where these figures come from:", "", *sources, ""]
            answers += _answers(section, files)
            known.update(used)
    lines = ["# Results", "", *introduction.strip().split("\n"), ""]
    if answers:
        lines += markdown(("question", "measured"), answers)
    if further := [file for name, file in files.items() if name not in known]:
        body += ["## Further records", "", "In no table above:", ""]
        body += [line for file in further for line in _source(file, folder)]
    return "\n".join(lines + body).rstrip() + "\n"


def _part(part: Part, files: Files, folder: Path, used: dict[str, RecordFile]) -> list[str]:
    """A part's lines; adds its files to those used."""
    found = [file for form in part.files for name, file in files.items() if fnmatchcase(name, form)]
    shown = _checked(lambda all_of: list(part.show(all_of)), found) if found else []
    if not shown:
        return []
    used.update({file.name: file for file in found})
    links = ", ".join(f"[{file.name}]({_link(file.path, folder)})" for file in found)
    records = f"Record{'s' if len(found) > 1 else ''}: {links}."
    lines = [f"### {part.title}", "", *_prose(f"{part.text} {records}".lstrip()), *shown]
    lines += [""] if lines[-1] else []
    for name, description in part.figures:
        for path in sorted(found[0].path.parent.glob(name)):
            lines += [f"![{description}]({_link(path, folder)})", ""]
    return lines


def _answers(section: Section, files: Files) -> Iterator[tuple[str, str]]:
    """The section's lines of the summary."""
    for answer in section.answers:
        found = [files[name] for name in answer.files if name in files]
        if len(found) == len(answer.files):
            text = _checked(lambda all_of, show=answer.show: show(*all_of), found)
            if text:
                yield f"[{answer.question}](#{_anchor(section.title)})", text


def _checked(show: Callable[..., Any], found: Sequence[RecordFile]) -> Any:
    try:
        return show(found)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        names = ", ".join(str(file.path) for file in found)
        raise UsageError(
            f"{names}: a record's fields are not those of the benchmark of this name: {error!r}"
        ) from error


def _source(file: RecordFile, folder: Path) -> list[str]:
    """A list entry: the record, where it comes from, and its commands."""
    origin = f": {file.origin}" if file.origin else ""
    head = f"- [{file.path.name}]({_link(file.path, folder)}){origin}."
    lines = [f"{head} {file.note}".rstrip()]
    if script := file.content.get("script"):
        lines.append(f"  The script: {script}.")
    return lines + [f"  `{command}`" for command in file.commands]


def _link(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _anchor(title: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _prose(text: str) -> list[str]:
    """A paragraph's lines, with an empty one after them."""
    return [*textwrap.wrap(" ".join(text.split()), 118, break_on_hyphens=False), ""] if text else []
