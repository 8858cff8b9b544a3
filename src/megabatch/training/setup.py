"""Everything that can be wrong with a run is found here, before anything starts."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from megabatch.config.file import load_config, to_dict
from megabatch.config.problems import Conflict, problems, wrong_types
from megabatch.config.resolve import Given, given_in, length_conflicts, resolve
from megabatch.config.settings import MayChange, TrainConfig
from megabatch.data import PairDataset, PairLoader, open_pairs
from megabatch.data.mixture import parse_factors
from megabatch.data.order import pairs_per_epoch
from megabatch.errors import UsageError, all_of
from megabatch.extras import MissingLibrary
from megabatch.hints import option, settings_of, with_value
from megabatch.models import Towers
from megabatch.training import batch_norm, evaluating
from megabatch.training.towers import build_towers
from megabatch.training.world import World

T = TypeVar("T")


@dataclass
class Setup:
    """What a run works with; `notes`: what was changed about the configuration, a line each."""

    config: TrainConfig
    world: World
    towers: Towers
    loader: PairLoader
    total_steps: int
    notes: Sequence[str] = ()


def prepare(
    config: TrainConfig, world: World | None = None, *, given: Given | None = None
) -> Setup:
    """Open the data, build the model, and check that the run can be done.

    Args:
        config: the run's.
        world: its processes.
        given: where the configuration's values come from; by default what differs from the
            defaults was asked for, and all of that alike.

    Raises:
        UsageError: it cannot, here or on another rank; the message has every reason found.
    """
    world = world or World(torch.device("cpu"))
    known = given_in(config) if given is None else given
    return world.attempt(lambda: _prepare(config, world, known))


def _prepare(config: TrainConfig, world: World, given: Given) -> Setup:
    if missing := unnamed(config):
        raise UsageError(missing)
    notes: list[str] = []
    types_right = not wrong_types(config)
    if types_right:
        config, notes = resolve(config, given)
    reasons = problems(config) + compiler_problems(config, world.device)
    if not reasons and world.main:
        reasons += folder_problems(config)
    dataset = _attempt(reasons, lambda: open_data(config))
    if dataset is not None and types_right:
        pairs = pairs_per_epoch(dataset)
        config, more = resolve(config, given, lambda c: too_short(c, pairs))
        notes += more
        too_few = length_problems(config, pairs, world.size)
        reasons += too_few
        if too_few:  # which may be why
            reasons += [f"damaged: {line}" for line in getattr(dataset, "damage", [])]
    if not reasons:
        torch.manual_seed(config.seed)
    towers = _attempt(reasons, lambda: build_towers(config))
    if dataset is not None and towers is not None:
        reasons += kind_problems(config, getattr(dataset, "first", "image"), towers.first)
        reasons += batch_norm.problems(config, world)
        reasons += evaluating.problems(config, towers.first)
        if config.decode == "late" and towers.first == "text":
            reasons.append(
                f"--decode late: {config.model} takes texts, of which nothing is decoded"
            )
    if reasons or dataset is None or towers is None:
        raise UsageError(all_of(reasons))
    loader = PairLoader(
        dataset,
        batch_size=config.global_batch_size,
        transform=towers.train_transform,
        tokenizer=towers.tokenizer,
        seed=config.seed,
        workers=config.workers,
        rank=world.rank,
        world_size=world.size,
        timeout=config.data_timeout,
        late=config.micro_batch_size if config.decode == "late" else None,
    )
    return Setup(
        config, world, towers, loader, _total_steps(config, pairs_per_epoch(dataset)), notes
    )


def unnamed(config: TrainConfig, *names: str) -> str:
    """What to write where settings that a run cannot do without are not named; "" if all are."""
    lacking = [name for name in names or ("model", "train_data") if not getattr(config, name)]
    if not lacking:
        return ""
    examples = {"model": "--model ViT-B-32", "train_data": "--train-data 'shards/{000..099}.tar'"}
    written = " ".join(examples[name] for name in lacking)
    return (
        f"{' and '.join(map(option, lacking))}: not given; name {'both' if lacking[1:] else 'it'}, "
        f"such as {written}, or a configuration, such as --config quickstart"
    )


def check_folder(config: TrainConfig) -> None:
    """Raise a UsageError where the output folder cannot take this run."""
    if reasons := folder_problems(config):
        raise UsageError(all_of(reasons))


def folder_problems(config: TrainConfig) -> list[str]:
    """Why the output folder cannot take this run: not writable, another run's, no run's."""
    folder = config.output
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        return [f"--output {folder}: {existing} is no folder"]
    try:
        # Permissions alone do not tell: root may do anything, and a disk may be read-only.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return [f"--output {folder}: {existing} cannot be written to: {error.strerror or error}"]
    begun = [f for f in ("config.toml", "checkpoints", "metrics.jsonl") if (folder / f).exists()]
    if begun and not config.resume:
        return [
            f"--output {folder}: holds a run already; continue it with --resume, or choose another"
        ]
    if begun and "config.toml" not in begun:
        return [f"--resume: {folder} has {begun[0]} but no config.toml"]
    return _differences(config) if begun else []


def compiler_problems(config: TrainConfig, device: torch.device) -> list[str]:
    """Why torch.compile, which is to be used, would fail at the first step."""
    if not config.torchcompile:
        return []
    on_gpu = device.type == "cuda"
    variable, usual = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++", "clang++"))
    wanted = tuple(shlex.split(os.environ.get(variable, ""))[:1]) or usual
    if any(map(shutil.which, wanted)):
        return []
    return [
        f"--torchcompile: torch.compile needs a compiler, and there is no {' or '.join(wanted)}"
        f" ({variable} names another one)"
    ]


def kind_problems(config: TrainConfig, given: str, taken: str) -> list[str]:
    """Why a model does not take what the pairs have first, "image" or "text"."""
    if given == taken:
        return []
    hint = " (--csv-query-key names the column of first texts)" if taken == "text" else ""
    return [
        f"--model {config.model}: it takes {taken}s with texts, but {config.train_data} "
        f"has {given}s{hint}"
    ]


def length_problems(config: TrainConfig, pairs: int, ranks: int = 1) -> list[str]:
    """Why a data set of so many pairs an epoch is too small for this run."""
    if config.global_batch_size < 1:
        return []
    batch = with_value("global_batch_size", config.global_batch_size)
    if config.global_batch_size < ranks:
        return [f"{batch}: expected at least 1 for each of {ranks} processes"]
    if config.global_batch_size > pairs:
        return [f"{batch}: expected at most {pairs}, the pairs that there are"]
    return [conflict.reason for conflict in too_short(config, pairs)]


def too_short(config: TrainConfig, pairs: int) -> list[Conflict]:
    """What the run is too short for, with so many pairs an epoch."""
    if config.global_batch_size < 1:
        return []
    return length_conflicts(config, _total_steps(config, pairs))


def _differences(config: TrainConfig) -> list[str]:
    now, before = to_dict(config), to_dict(load_config(config.output / "config.toml"))
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


def open_data(config: TrainConfig) -> PairDataset:
    """The configuration's training data; a UsageError where there are none."""
    factors = config.train_data_upsampling_factors
    try:
        return open_pairs(
            config.train_data,
            upsampling_factors=None if factors is None else parse_factors(factors),
            image_column=config.csv_img_key,
            query_column=config.csv_query_key,
            caption_column=config.csv_caption_key,
            separator=config.csv_separator,
            svg_size=config.svg_size,
        )
    except MissingLibrary:
        raise
    except UsageError as error:
        reason = str(error)
        raise UsageError(
            reason if reason.startswith("--") else f"--train-data: {reason}"
        ) from error


def _total_steps(config: TrainConfig, pairs: int) -> int:
    return config.steps or config.epochs * (pairs // config.global_batch_size)


def _attempt(reasons: list[str], make: Callable[[], T]) -> T | None:
    try:
        return make()
    except UsageError as error:
        reasons.append(str(error))
        return None
