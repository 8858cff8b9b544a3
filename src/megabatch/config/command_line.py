"""The command line of `megabatch train` and `megabatch plan`: options to a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megabatch.config.file import packaged, read_settings
from megabatch.config.references import refuse_references
from megabatch.config.settings import COMMON, GROUPS, OPENCLIP, TrainConfig
from megabatch.errors import UsageError
from megabatch.models import names
from megabatch.options import Parser

_DESCRIPTION = """Train two towers on pairs with one contrastive loss over the whole global batch.

Name a model and data (--model ViT-B-32 --train-data 'shards/{{000..099}}.tar'), or a configuration
(--config {names}). Options override the configuration, which overrides defaults."""

#: Defaults for a pretrained text encoder, as is usual with BERT and its successors and AdamW.
FINE_TUNING = {"lr": 2e-5, "wd": 0.01}


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
    return Parser(classes, prog, text, GROUPS, OPENCLIP, common)


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
    if file is None and asked.resume and os.path.isfile(asked.output / "config.toml"):
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
