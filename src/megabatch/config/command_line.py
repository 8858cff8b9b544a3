"""The command line of `megabatch train` and `megabatch plan`: options to a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megabatch.config.file import packaged, read_settings
from megabatch.config.openclip_options import INSTEAD, VALUES
from megabatch.config.problems import problems, unnamed
from megabatch.config.references import SETTINGS, SOURCES, absent, refuse_references
from megabatch.config.resolve import Given, levels, name_defaults, resolve
from megabatch.config.settings import COMMON, GROUPS, TrainConfig
from megabatch.errors import UsageError, all_of
from megabatch.hints import is_reference, option
from megabatch.models import names, weights
from megabatch.models.own_code import load
from megabatch.options import Parser

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


def parser(
    classes: Sequence[type],
    prog: str,
    description: str,
    common: Sequence[str] = ("config", *COMMON),
    **groups: str,
) -> Parser:
    """The parser of a command that takes the options of `megabatch train`."""
    text = description.format(names=" or ".join(packaged()))
    headings = {"config": "configuration", **GROUPS, **groups}
    return Parser(classes, prog, text, headings, INSTEAD, VALUES, common)


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


def check(config: TrainConfig, given: Given, *needed: str) -> None:
    """Refuse whatever is known to be wrong without a library, as importing torch takes seconds.

    The trainer and the planner check everything again, with the rest.

    Args:
        config, given: as `parse` returns them.
        needed: the required settings. Default: model and data.

    Raises:
        UsageError: with all reasons.
    """
    if lacking := unnamed(config, *needed):
        raise UsageError(name_defaults(lacking, given))
    config, _ = resolve(config, given)
    reasons = problems(config, here=False)
    if not needed or "train_data" in needed:
        for name in SOURCES:
            found = absent(getattr(config, name) or "")
            reasons += [f"{option(name)}: nothing matches {source}" for source in found]
    if reasons := reasons + list(_unusable(config)):
        raise UsageError(name_defaults(all_of(reasons), given))


def _unusable(config: TrainConfig) -> Iterator[str]:
    """Names of a model, of weights or of code that cannot be used."""
    code = {name: getattr(config, name) for name in SETTINGS if is_reference(getattr(config, name))}
    checks: list[Callable[[], object]] = [
        partial(names.check, config.model, config.pretrained),
        *(partial(load, reference, name) for name, reference in code.items()),
    ]
    for name in ("pretrained_image_path", "pretrained_text_path"):
        if path := getattr(config, name):
            checks.append(partial(weights.find, path, option(name)))
    for one in checks:
        try:
            one()
        except UsageError as error:
            yield str(error)
