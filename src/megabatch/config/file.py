"""Configurations from the command line and from TOML files, and written to files.

Settings may name code to run: `module:name`, the user's own losses and models, and data that a
command prints (`pipe:`). They count only if they come from the command line or from a Python call;
from a file they are refused unless the user trusts the file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from megabatch import files
from megabatch.config.settings import COMMON, OPENCLIP, TrainConfig
from megabatch.errors import UsageError, all_of, did_you_mean
from megabatch.hints import is_reference, option, with_value
from megabatch.models import names
from megabatch.options import Parser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DESCRIPTION = """Train two towers on pairs with one contrastive loss over the whole global batch.

Name a model and data (--model ViT-B-32 --train-data 'shards/{{000..099}}.tar'), or a configuration
(--config {names}). Options override the configuration, which overrides defaults."""

#: Defaults for a pretrained text encoder, as is usual with BERT and its successors and AdamW.
FINE_TUNING = {"lr": 2e-5, "wd": 0.01}

_CONFIGS = resources.files("megabatch.config") / "packaged"

#: The beginning of a data source that is a command.
COMMAND = "pipe:"


@dataclass(frozen=True)
class Start:
    """The file of settings, and whether it is trusted."""

    config: str | None = None
    """TOML file with settings: a packaged one by name, or your own, such as a run's config.toml."""
    trust: bool = False
    """Allow the configuration, or that of a resumed run, to name code to run: a model or a loss of
    the form module:name, or data that a command prints (pipe:)."""


def parse(argv: Sequence[str]) -> TrainConfig:
    """The configuration that the options of `megabatch train` describe; see `configure`.

    Raises:
        UsageError: an option or the file is invalid, or the file names code and is not trusted.
        SystemExit: after `--help`.
    """
    classes, common = (Start, TrainConfig), ("config", *COMMON)
    return configure(parser("megabatch train", _DESCRIPTION, classes, common).parse(argv))


def parser(prog: str, description: str, classes: tuple[type, ...], common: Sequence[str]) -> Parser:
    """The parser of a command that takes the options of `megabatch train`."""
    text = description.format(names=" or ".join(packaged()))
    return Parser(classes, prog, text, OPENCLIP, common)


def configure(options: Mapping[str, Any]) -> TrainConfig:
    """The configuration from parsed options, the file of `--config`, and defaults, in this order.

    With `--resume` and without `--config` the file is the one in the run's folder. `--epochs` or
    `--steps` replaces both of the file. A pretrained text encoder has defaults of its own.

    Raises:
        UsageError: the file is invalid, or names code and is not trusted; two lengths are given.
    """
    own = {name: value for name, value in options.items() if name not in vars(Start())}
    file = options.get("config")
    lengths = [name for name in ("epochs", "steps") if own.get(name) is not None]
    if len(lengths) == 2:
        raise UsageError("--epochs --steps: expected one of them")
    asked = TrainConfig(**own)
    if file is None and asked.resume and (asked.output / "config.toml").is_file():
        file = asked.output / "config.toml"
    settings = {} if file is None else read_settings(file)
    if lengths:
        settings = {k: v for k, v in settings.items() if k not in ("epochs", "steps")}
    if not options.get("trust"):
        refuse_references({k: v for k, v in settings.items() if k not in own}, f"{file}")
    settings |= own
    config = TrainConfig(**settings)
    encoder = names.is_trained(config.model) and names.is_text_encoder(config.model)
    if encoder and config.opt == "adamw":
        settings = FINE_TUNING | settings
    return TrainConfig(**settings)


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
        return Parser((TrainConfig,), "megabatch train", "", OPENCLIP).parse(words)
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


def is_url(source: str) -> bool:
    """Whether a data source has the form of a URL, such as s3://bucket/a.tar."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source) is not None


def runs_code(settings: Mapping[str, Any]) -> list[str]:
    """The names of the settings that name code to run: of a model, a loss or data."""
    found = [name for name in ("model", "loss") if is_reference(settings.get(name))]
    return found + [n for n in ("train_data", "val_data") if COMMAND in str(settings.get(n))]


def refuse_references(settings: Mapping[str, Any], file: Path | str) -> None:
    """Raise a UsageError if settings that were read from a file name code to run."""
    reasons = [
        f"{file}: {name} = {settings[name]!r} would run code, for which only the command line may "
        "ask; --trust allows it if you trust this file"
        for name in runs_code(settings)
    ]
    if reasons:
        raise UsageError(all_of(reasons))
