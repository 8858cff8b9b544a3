"""The command line of `megabatch train` and `megabatch plan`: options to a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megabatch.config.file import packaged, read_settings
from megabatch.config.openclip_options import INSTEAD, VALUES
from megabatch.config.resolve import Given, levels
from megabatch.config.settings import GROUPS, TrainConfig
from megabatch.options import Parser

_DESCRIPTION = """Train two towers on pairs with one contrastive loss over the whole global batch.

Name a model and data (--model ViT-B-32 --train-data 'shards/{{000..099}}.tar'), or a configuration
(--config {names}). Options go before the settings of a configuration, and those before
defaults."""


@dataclass(frozen=True)
class Start:
    """Where settings come from that are no options."""

    config: str | None = None
    """A TOML file to start from: a packaged one by its name, or your own, such as a run's
    config.toml."""


def parse(argv: Sequence[str]) -> tuple[TrainConfig, Given]:
    """Turn options into a configuration: defaults, then `--config`'s file, then the others.

    With `--resume` and no `--config` the file is the one in the run's folder.

    Returns:
        The configuration, and where its values come from.

    Raises:
        UsageError: an option or a file cannot be used.
        SystemExit: after `--help`.
    """
    return configure(parser((Start, TrainConfig), "megabatch train", _DESCRIPTION).parse(argv))


def parser(classes: Sequence[type], prog: str, description: str, **groups: str) -> Parser:
    """Of a command that takes the options of `megabatch train`."""
    text = description.format(names=" or ".join(packaged()))
    headings = {"config": "configuration", **GROUPS, **groups}
    return Parser(classes, prog, text, headings, INSTEAD, VALUES)


def configure(chosen: dict[str, Any]) -> tuple[TrainConfig, Given]:
    """The configuration that options make, and where its values come from; see `parse`."""
    options = dict(chosen)
    name = options.pop("config", None)
    config = TrainConfig(**options)
    own = config.output / "config.toml"
    if name is None and config.resume and own.is_file():
        name = own
    settings = {} if name is None else read_settings(name)
    return replace(TrainConfig(), **settings | options), levels(settings, options)
