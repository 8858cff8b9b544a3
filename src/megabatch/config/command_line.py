"""The command line of `megabatch train` and `megabatch plan`: options to a configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megabatch.config.file import packaged, read_settings
from megabatch.config.openclip_options import INSTEAD, VALUES
from megabatch.config.resolve import Given, levels
from megabatch.config.settings import GROUPS, TrainConfig
from megabatch.options import Parser
from megabatch.references import refuse_references

_DESCRIPTION = """Train two towers on pairs with one contrastive loss over the whole global batch.

Name a model and data (--model ViT-B-32 --train-data 'shards/{{000..099}}.tar'), or a configuration
(--config {names}). Options override the configuration, which overrides defaults."""


@dataclass(frozen=True)
class Start:
    """The source of all settings that are not given as options, and whether it is trusted."""

    config: str | None = None
    """A TOML file with settings: a packaged one by name, or your own, such as a run's config.toml.
    """
    trust: bool = False
    """Allow the configuration, even that of a resumed run, to name code to run: a model or a loss
    of the form module:name, or data that a command prints (pipe:). Otherwise only the command line
    may.
    """


def parse(argv: Sequence[str]) -> tuple[TrainConfig, Given]:
    """Build a configuration from defaults, the file of `--config` and options, in this order.

    With `--resume` and without `--config` the file is the one in the run's folder.

    Returns:
        The configuration and the sources of its values.

    Raises:
        UsageError: an option or the file is invalid, or the file names code and is not trusted.
        SystemExit: after `--help`.
    """
    return configure(parser((Start, TrainConfig), "megabatch train", _DESCRIPTION).parse(argv))


def parser(classes: Sequence[type], prog: str, description: str, **groups: str) -> Parser:
    """The parser of a command that takes the options of `megabatch train`."""
    text = description.format(names=" or ".join(packaged()))
    headings = {"config": "configuration", **GROUPS, **groups}
    return Parser(classes, prog, text, headings, INSTEAD, VALUES)


def configure(chosen: dict[str, Any]) -> tuple[TrainConfig, Given]:
    """The configuration from parsed options, and the sources of its values; see `parse`."""
    options = dict(chosen)
    name, trust = options.pop("config", None), options.pop("trust", False)
    config = TrainConfig(**options)
    own = config.output / "config.toml"
    if name is None and config.resume and os.path.isfile(own):
        name = own
    settings = {} if name is None else read_settings(name)
    if not trust:
        refuse_references({k: v for k, v in settings.items() if k not in options}, f"{name}")
    return replace(TrainConfig(), **settings | options), levels(settings, options)
