"""The folder of a run: checks that it can be used, and a lock against a second process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

from megabatch import files
from megabatch.config.file import load_config, to_dict
from megabatch.config.settings import MAY_CHANGE, TrainConfig
from megabatch.errors import UsageError
from megabatch.options import option


def locked_file(folder: Path) -> TextIO:
    """Open RUN/run.lock, locked for as long as it is open; UsageError if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "run.lock").open("w")
    try:
        files.lock(file, wait=False)
    except BlockingIOError:
        raise UsageError(f"--output: {folder} is being written by another process") from None
    return file


def folder_problems(config: TrainConfig) -> list[str]:
    """Reasons why the output folder cannot be used: not writable, another run's, not a run's."""
    folder = config.output
    if problem := files.folder_problem(folder):
        return [f"--output {folder}: {problem}"]
    begun = [f for f in ("config.toml", "checkpoints", "metrics.jsonl") if (folder / f).exists()]
    if begun and not config.resume:
        return [
            f"--output {folder}: holds a run already; continue it with --resume, or choose another"
        ]
    if begun and "config.toml" not in begun:
        return [f"--resume: {folder} has {begun[0]} but no config.toml"]
    return _differences(config) if begun else []


def _differences(config: TrainConfig) -> list[str]:
    # Trusted, as the values are compared only.
    own = load_config(config.output / "config.toml", trust=True)
    now, before = to_dict(config), to_dict(own)
    declared: Any = TrainConfig
    changed = [
        f"{option(key)} was {before[key]}, is {now[key]}"
        for key in now
        if now[key] != before[key] and MAY_CHANGE not in declared.__pydantic_fields__[key].metadata
    ]
    if not changed:
        return []
    return [f"--resume: {config.output} is a run with other settings: {', '.join(changed)}"]
