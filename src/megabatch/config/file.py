"""Configurations as TOML files: packaged ones by name, others by path."""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from megabatch import files
from megabatch.config.references import refuse_references, runs_code
from megabatch.config.settings import OPENCLIP, TrainConfig
from megabatch.errors import UsageError, did_you_mean
from megabatch.hints import option, with_value
from megabatch.options import Parser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CONFIGS = resources.files("megabatch.config") / "packaged"


def packaged() -> list[str]:
    """Names of the configurations that come with the library."""
    return sorted(f.name.removesuffix(".toml") for f in _CONFIGS.iterdir())


def load_config(name_or_path: str | Path, *, trust: bool = False) -> TrainConfig:
    """Read a configuration: a packaged one by name, or a TOML file. Missing fields have defaults.

    With `trust`, it may name code to run (`module:name`, or data from `pipe:`).

    Raises:
        UsageError: there is no such file, it is not TOML, it has unknown keys or an invalid value,
            or it names code to run.
    """
    settings = read_settings(name_or_path)
    if not trust:
        refuse_references(settings, name_or_path)
    return TrainConfig(**settings)


def read_settings(name_or_path: str | Path) -> dict[str, Any]:
    """The settings that a configuration contains, by field, code to run among them.

    Raises:
        UsageError: as `load_config`.
    """
    name = str(name_or_path)
    file = _CONFIGS / f"{name}.toml" if name in packaged() else Path(name)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        expected = f"expected a file or {' or '.join(packaged())}{did_you_mean(name, packaged())}"
        raise UsageError(f"--config {name}: {expected}") from error
    except (OSError, ValueError) as error:  # of the file, of its encoding, of TOML
        raise UsageError(f"--config {name}: cannot be read: {error}") from error
    words = [word for key, value in values.items() for word in _typed(key, value)]
    try:
        return Parser((TrainConfig,), f"--config {name}", "", elsewhere=OPENCLIP).parse(words)
    except UsageError as error:
        raise UsageError(f"--config {name}: {error}") from error


def _typed(key: str, value: Any) -> list[str]:
    """A line of a file as it is typed on a command line."""
    if isinstance(value, list):
        return [option(key), *map(str, value)]
    return [with_value(key, value) if isinstance(value, bool) else f"{option(key)}={value}"]


def save_config(config: TrainConfig, path: Path) -> None:
    """Write every field except `resume`, atomically, for `load_config`.

    Raises:
        OSError: the file cannot be written.
    """
    values = to_dict(config)
    trust = " --trust" if runs_code(values) else ""
    again = f"megabatch train --config THIS_FILE{trust} --output ANOTHER_FOLDER"
    lines = [f"# To repeat this run: {again}"]
    for key, value in values.items():
        # JSON is valid TOML, except for null and one control character.
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"# {key} is not set" if value is None else f"{key} = {text}")
    files.write_text(path, "\n".join(lines) + "\n")


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The fields that `save_config` writes, with values as JSON and TOML represent them."""
    values = {k: str(v) if isinstance(v, Path) else v for k, v in vars(config).items()}
    del values["resume"]  # how a run was started, which a repetition need not share
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
