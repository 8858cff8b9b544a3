"""Configurations as TOML files: packaged ones by name, others by path."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from megabatch import files
from megabatch.config.references import named, refuse_references
from megabatch.config.settings import TrainConfig
from megabatch.errors import UsageError, did_you_mean
from megabatch.hints import settings_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CONFIGS = resources.files("megabatch.config") / "packaged"
_NOT_SAVED = ("resume",)  # how a run was started, which a repetition need not share


def packaged() -> list[str]:
    """Names of the configurations that come with the library."""
    return sorted(f.name.removesuffix(".toml") for f in _CONFIGS.iterdir() if ".toml" in f.name)


def load_config(name_or_path: str | Path, *, trust: bool = False) -> TrainConfig:
    """Read a configuration: a packaged one by name, or a TOML file. Missing fields have defaults.

    With `trust`, its model and loss may be code to run (`module:name`).

    Raises:
        UsageError: there is no such file, it is not TOML, it has unknown keys or values of the
            wrong type, in which case the message has all of them, or it names code to run.
    """
    settings = read_settings(name_or_path)
    if not trust:
        refuse_references(settings, name_or_path)
    return replace(TrainConfig(), **settings)


def read_settings(name_or_path: str | Path) -> dict[str, Any]:
    """The settings that a configuration contains, by field, code to run among them.

    Raises:
        UsageError: as `load_config`.
    """
    name = str(name_or_path)
    if name in packaged():
        return _parse((_CONFIGS / f"{name}.toml").read_text(encoding="utf-8"), name)
    try:
        return _parse(Path(name).read_text(encoding="utf-8"), name)
    except FileNotFoundError as error:
        raise UsageError(
            f"--config {name}: neither a file nor one of {', '.join(packaged())}"
            + did_you_mean(name, packaged())
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {name}: cannot be read: {error}") from error


def save_config(config: TrainConfig, path: Path) -> None:
    """Write every field except `resume`, atomically, for `load_config`.

    Raises:
        OSError: the file cannot be written.
    """
    values = to_dict(config)
    trust = " --trust" if named(values) else ""
    again = f"megabatch train --config THIS_FILE{trust} --output ANOTHER_FOLDER"
    lines = [f"# To repeat this run: {again}"]
    for key, value in values.items():
        # TOML has no null.
        lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml(value)}")
    files.write_text(path, "\n".join(lines) + "\n")


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The fields that `save_config` writes, with values as JSON and TOML represent them."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _NOT_SAVED}
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _toml(value: Any) -> str:
    # JSON strings, numbers and booleans are valid TOML, except for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {source}: not TOML: {error}") from error
    settings = settings_of(TrainConfig)
    reasons = []
    for key, value in values.items():
        if isinstance(value, list):
            value = values[key] = tuple(value)
        if key not in settings:
            reasons.append(f"{key} is not a setting{did_you_mean(key, settings)}")
            continue
        setting = settings[key]
        if value and isinstance(value, str) and Path in setting.kinds:
            values[key] = Path(value)
        elif not setting.accepts(value):
            reasons.append(f"{key} = {value!r}: expected {setting.wanted(value)}")
    if reasons:
        raise UsageError(f"--config {source}: {'; '.join(reasons)}")
    return values
