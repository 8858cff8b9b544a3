"""Configurations from the command line and from TOML files, and written to files.

Settings may name code to run: the user's own losses and models (`module:name`), and data that a
command prints (`pipe:`). Those of a file are refused unless the user trusts it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from megabatch import files
from megabatch.config.settings import TrainConfig
from megabatch.errors import UsageError, did_you_mean
from megabatch.models import names
from megabatch.options import CONFIG, is_reference, make, read_words

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DESCRIPTION = """Train two towers on pairs with one contrastive loss over the whole global batch.

Name a model and data (--model ViT-B-32 --train-data 'shards/{000..099}.tar'), or a configuration
(--config quickstart). Options override the configuration, which overrides defaults."""

FINE_TUNING = {"lr": 2e-5, "wd": 0.01}  #: defaults for a pretrained text encoder and AdamW

#: The configurations that come with the library, by name.
_PACKAGED = {file.stem: file for file in Path(__file__).with_name("packaged").glob("*.toml")}

COMMAND = "pipe:"  #: the beginning of a data source that is a command


@dataclass(frozen=True, config=CONFIG)
class Start:
    """The file of settings, and whether it is trusted."""

    config: str | None = None
    """TOML file with settings: a packaged one by name, or your own, such as a run's config.toml."""
    trust: bool = False
    """Allow the file, also of a resumed run, to name code to run: module:name or pipe:COMMAND."""


def parse(argv: Sequence[str]) -> TrainConfig:
    """The configuration that the options of `megabatch train` describe; see `configure`.

    Raises:
        UsageError: an option or the file is invalid, or the file names code and is not trusted.
        SystemExit: after `--help`.
    """
    return configure(read_words((Start, TrainConfig), argv, "megabatch train", _DESCRIPTION))


def configure(given: Mapping[str, Any]) -> TrainConfig:
    """The configuration from options, the file of `--config`, and defaults, in this order.

    With `--resume` and without `--config` the file is the one in the run's folder. `--epochs` or
    `--steps` replaces both of the file. A pretrained text encoder has defaults of its own.

    Raises:
        UsageError: the file is invalid, or names code and is not trusted; two lengths are given.
    """
    own = {name: value for name, value in given.items() if name not in ("config", "trust")}
    lengths = [name for name in ("epochs", "steps") if own.get(name)]
    if len(lengths) == 2:
        raise UsageError("--epochs --steps: expected one of them")
    config = make(TrainConfig, own)
    begun = config.output / "config.toml"
    file = given.get("config", begun if config.resume and begun.is_file() else None)
    settings = {} if file is None else _read(file)
    if not given.get("trust"):
        refuse_references({k: v for k, v in settings.items() if k not in own}, f"{file}")
    if lengths:
        settings = {k: v for k, v in settings.items() if k not in ("epochs", "steps")}
    config = make(TrainConfig, settings | own)
    encoder = names.is_trained(config.model) and names.is_text_encoder(config.model)
    if encoder and config.opt == "adamw":
        config = make(TrainConfig, FINE_TUNING | settings | own)
    return config


def load_config(name_or_path: str | Path, *, trust: bool = False) -> TrainConfig:
    """Read a configuration: a packaged one by name, or a TOML file. Missing fields have defaults.

    With `trust`, it may name code to run (`module:name`, or data from `pipe:`).

    Raises:
        UsageError: there is no such file, it is not TOML, it has unknown keys or an invalid value,
            or it names code to run.
    """
    values = _read(name_or_path)
    if not trust:
        refuse_references(values, name_or_path)
    return make(TrainConfig, values)


def _read(name_or_path: str | Path) -> dict[str, Any]:
    """The settings that a configuration contains, which are valid; code to run among them."""
    name = str(name_or_path)
    try:
        values = tomllib.loads(_PACKAGED.get(name, Path(name)).read_text(encoding="utf-8"))
        # A boolean is no number: as a word it is refused where one is expected.
        values = {k: str(v) if isinstance(v, bool) else v for k, v in values.items()}
        make(TrainConfig, values)
    except UsageError as error:
        raise UsageError(f"--config {name}: {error}") from error
    except (OSError, ValueError) as error:  # of the file, of its encoding, of TOML
        known = f"a file or {' or '.join(sorted(_PACKAGED))}{did_you_mean(name, _PACKAGED)}"
        raise UsageError(f"--config {name}: cannot be read: {error}; expected {known}") from error
    return values


def save_config(config: TrainConfig, path: Path) -> None:
    """Write every field except `resume`, atomically, for `load_config`.

    Raises:
        OSError: the file cannot be written.
    """
    lines = ["# To repeat this run: megabatch train --config THIS_FILE --output ANOTHER_FOLDER"]
    for key, value in to_dict(config).items():
        # JSON is valid TOML, except for null and one control character.
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"# {key} is not set" if value is None else f"{key} = {text}")
    files.write_text(path, "\n".join(lines) + "\n")


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The fields that `save_config` writes, with values as JSON and TOML represent them."""
    # How a run was started need not be shared by its repetition.
    return TypeAdapter(TrainConfig).dump_python(config, mode="json", exclude={"resume"})


def refuse_references(settings: Mapping[str, Any], file: Path | str) -> None:
    """Raise a UsageError if settings that were read from a file name code to run."""
    for name in ("model", "loss", "train_data", "val_data"):
        value = settings.get(name)
        if is_reference(value) or COMMAND in str(value):
            raise UsageError(
                f"{file}: {name} = {value!r} would run code, for which only the command line may "
                "ask; --trust allows it if you trust this file"
            )
