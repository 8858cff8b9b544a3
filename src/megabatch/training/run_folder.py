"""Checks that the folder of a run can be used."""

from __future__ import annotations

from megabatch import files
from megabatch.config.file import load_config, to_dict
from megabatch.config.settings import MayChange, TrainConfig
from megabatch.hints import option, settings_of


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
    settings = settings_of(TrainConfig)
    changed = [
        f"{option(key)} was {_shown(before[key])}, is {_shown(now[key])}"
        for key in now
        if now[key] != before[key] and settings[key].mark(MayChange) is None
    ]
    if not changed:
        return []
    return [f"--resume: {config.output} is a run with other settings: {', '.join(changed)}"]


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)
