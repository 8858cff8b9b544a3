"""The files of records that benchmarks write, as the page needs them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.errors import UsageError

Record = dict[str, Any]


@dataclass(frozen=True)
class RecordFile:
    """One JSON file, its content and what it says about its origin."""

    path: Path
    content: dict[str, Any]

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    @property
    def records(self) -> list[Record]:
        """The measurements of the file."""
        found: list[Record] = self.content.get("records", [])
        return found

    @property
    def measured(self) -> list[Record]:
        """The records that have figures: all but skipped and failed ones."""
        return [r for r in self.records if r.get("status", "ok") in ("ok", "wrong")]

    @property
    def commands(self) -> list[str]:
        """The command line, or all of them where several calls wrote the file."""
        several = self.content.get("commands") or [r.get("command") for r in self.records]
        own = list(dict.fromkeys(command for command in several if command))
        whole = self.content.get("command")
        return own if whole is None or whole in own else [whole]

    @property
    def date(self) -> str:
        """The day of the measurement; empty if the file has none."""
        dates = [self.content.get("date"), *(r.get("date") for r in self.records)]
        return max((str(date)[:10] for date in dates if date), default="")

    @property
    def origin(self) -> str:
        """Machine, torch, commit and day, as far as the file says."""
        versions = self.content.get("versions", {})
        torch = f"torch {versions['torch'].partition('+')[0]}" if "torch" in versions else ""
        commit = self.content.get("commit")
        parts = [place(self.content.get("machine")), torch, commit and f"commit {commit}"]
        return ", ".join(part for part in [*parts, self.date] if part)

    @property
    def note(self) -> str:
        """The file's own remark on its figures."""
        return str(self.content.get("note") or self.content.get("what") or "")


def place(machine: dict[str, Any] | str | None) -> str:
    """A machine in a few words: its GPUs by kind, or else its CPU."""
    if machine is None or isinstance(machine, str):
        return machine or ""
    gpus: list[str] = machine.get("gpus") or []
    kinds = [f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus)]
    cores = f", {machine['cores']} cores" if "cores" in machine else ""
    return ", ".join(kinds).removeprefix("1 x ") or f"{machine.get('cpu', '')}{cores}"


def read(folder: Path) -> dict[str, RecordFile]:
    """The record files of a folder by name.

    Raises:
        UsageError: the folder does not exist or has no JSON file, or a file is not readable.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise UsageError(f"--results {folder}: has no JSON file, expected a folder of records")
    return {path.stem: RecordFile(path, _content(path)) for path in paths}


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON: {error}") from error
    if isinstance(content, list):  # records without anything about their origin
        content = {"records": content}
    if not isinstance(content, dict):
        raise UsageError(f"{path}: has a {type(content).__name__}, expected an object or a list")
    records = content.get("records", [])
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UsageError(
            f"{path}: `records` is not a list of objects, expected a benchmark's records"
        )
    return content
