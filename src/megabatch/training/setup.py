"""Preparation of a run: opens the data, builds the model, and finds all errors beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from megabatch.config.file import to_dict
from megabatch.config.objective import check_custom, create_objective
from megabatch.config.problems import Conflict, problems, unnamed, wrong_types
from megabatch.config.resolve import (
    Given,
    fine_tuned,
    given_in,
    length_conflicts,
    name_defaults,
    resolve,
)
from megabatch.config.settings import TrainConfig, activation_bytes, unmeasured_micro_batch
from megabatch.data import PairDataset, PairLoader, open_pairs
from megabatch.data.late import mean_bytes
from megabatch.data.mixture import parse_factors
from megabatch.data.order import pairs_per_epoch
from megabatch.errors import UsageError, all_of, naming, plural
from megabatch.hints import is_reference, option, with_value
from megabatch.losses.registry import TRAINABLE
from megabatch.models import ModelOptions, Towers, create
from megabatch.models.images import TorchResize
from megabatch.models.layers import layer_ids, lock, set_modes
from megabatch.models.pooling import saved_pooling
from megabatch.models.weights import load_tower
from megabatch.planning.micro_batches import TextLengths, sampled_lengths
from megabatch.training import evaluating, trackers
from megabatch.training.micro_batch import batch_norms
from megabatch.training.optimizer import DEFAULT_WARMUP, warmup_steps
from megabatch.training.run_folder import folder_problems
from megabatch.training.world import World

T = TypeVar("T")

#: Settings that may differ between ranks: paths on each one's machine, its memory and its speed.
_OF_A_RANK = (
    *("output", "train_data", "val_data"),
    *("pretrained", "pretrained_image_path", "pretrained_text_path"),
    *("micro_batch_size", "workers", "torchcompile", "data_timeout", "dist_timeout"),
)


@dataclass
class Setup:
    """Everything a run needs; `notes`: lines on settings that were changed or have no effect."""

    config: TrainConfig
    world: World
    towers: Towers
    loader: PairLoader
    total_steps: int
    notes: Sequence[str] = ()


def prepare(
    config: TrainConfig, world: World | None = None, *, given: Given | None = None
) -> Setup:
    """Open the data, build the model, and check the configuration.

    Args:
        config: the run's settings.
        world: its processes. Default: this one, on the CPU.
        given: the sources of the settings; see `resolve.given_in` for the default.

    Raises:
        UsageError: the run is impossible, here or on another rank; the message has all reasons.
    """
    world = world or World(torch.device("cpu"))
    known = given_in(config) if given is None else given
    setup = world.attempt(lambda: _prepare(config, world, known))
    _check_ranks(setup)
    if is_reference(setup.config.loss):
        # By itself, since the loss may communicate: no rank may have failed before.
        world.attempt(lambda: _check_loss(setup))
    return setup


def _prepare(config: TrainConfig, world: World, given: Given) -> Setup:
    """As `prepare`, on this rank: the settings, the data, the model, and then the loader."""
    if missing := unnamed(config):
        raise UsageError(name_defaults(missing, given))
    if wrong := wrong_types(config):
        raise UsageError(all_of(wrong))
    config, notes = resolve(config, given)
    config, more = fine_tuned(config, given)
    notes += more
    if config.torchcompile is None:
        config = replace(config, torchcompile=world.device.type == "cuda")
        if config.torchcompile:
            notes.append("the towers are compiled in the first steps (--no-torchcompile: not)")
    reasons = problems(config)
    on_cpu = world.device.type == "cpu"
    if not reasons and on_cpu and config.plan == "off" and activation_bytes(config, "cpu"):
        asked = f"--activation-memory {config.activation_memory}"
        reasons = [f"{asked}: on the CPU it needs a plan, which --plan off omits"]
    if not reasons and world.main:
        reasons += folder_problems(config) + trackers.problems(config)

    dataset = _attempt(reasons, lambda: open_data(config))
    if dataset is not None:
        pairs = pairs_per_epoch(dataset)
        config, more = resolve(config, given, lambda c: too_short(c, pairs))
        notes += more
        if too_few := length_problems(config, pairs, world.size):
            # Damaged sources may be the reason.
            damage = [f"damaged: {line}" for line in getattr(dataset, "damage", [])]
            reasons += too_few + damage

    if not reasons:
        torch.manual_seed(config.seed)
    towers = _attempt(reasons, lambda: build_towers(config))
    transform = None
    if dataset is not None and towers is not None:
        reasons += kind_problems(config, getattr(dataset, "first", "image"), towers.first)
        reasons += evaluating.problems(config, towers.first)
        notes += model_notes(config, towers) + batch_norm_notes(config, towers, world.size)
        transform = _attempt(reasons, lambda: train_transform(config, towers))
    if reasons or dataset is None or towers is None or transform is None:
        raise UsageError(name_defaults(all_of(reasons), given))

    loader = PairLoader(
        dataset,
        batch_size=config.global_batch_size,
        transform=transform,
        tokenizer=towers.tokenizer,
        seed=config.seed,
        workers=config.workers,
        rank=world.rank,
        world_size=world.size,
        timeout=config.data_timeout,
        late=unmeasured_micro_batch(config) if config.decode == "late" else None,
        pinned=world.device.type == "cuda",
        negatives=config.hard_negatives,
    )
    total_steps = _total_steps(config, pairs_per_epoch(dataset))
    notes += length_notes(config, total_steps)
    notes = [name_defaults(note, given) for note in notes]
    return Setup(config, world, towers, loader, total_steps, notes)


def _check_ranks(setup: Setup) -> None:
    """Raise a UsageError, on all ranks, if their settings or their numbers of pairs differ.

    Ranks read the settings of a resumed run from its folder, and their data, each for itself. With
    others than rank 0's they would draw their shares from another order of the pairs, or update
    their replicas differently.
    """
    settings = {k: v for k, v in to_dict(setup.config).items() if k not in _OF_A_RANK}
    tables = setup.world.gather((settings, len(setup.loader.dataset)))
    first, pairs = tables[0]
    for rank, (others, other_pairs) in enumerate(tables):
        changed = [
            f"{option(name)} is {value} on rank {rank}, {first[name]} on rank 0"
            for name, value in others.items()
            if value != first[name]
        ]
        if changed:
            raise UsageError(
                f"the processes have different settings: {', '.join(changed)} (give each the same "
                "options, and the same --config or, with --resume alone, the run's folder)"
            )
        if other_pairs != pairs:
            raise UsageError(
                f"--train-data: {plural(other_pairs, 'pair')} on rank {rank}, {pairs:,} on rank 0; "
                "expected the same files on all machines"
            )


def model_notes(config: TrainConfig, towers: Towers) -> list[str]:
    """Lines on what a user may not expect of a model: its padding, its pooling, its weights."""
    notes = []
    if config.trim_texts and not towers.lengths:
        notes.append(f"texts keep their padding: features of {config.model} may depend on it")
    prefix, _, folder = config.model.partition(":")
    own = saved_pooling(Path(folder)) if prefix == "hf" and towers.first == "text" else ""
    if own not in ("", config.hf_pooling):
        notes.append(
            f"--hf-pooling {config.hf_pooling} is used, although sentence-transformers' files in "
            f"{folder} name {own}"
        )
    # OpenCLIP's trainer starts such a tower with the weights that its name stands for.
    text: Any = getattr(towers.module, "text", None)
    loaded = config.pretrained or config.pretrained_text_path or ":" in config.model
    if not loaded and type(text).__name__ == "HFTextEncoder":
        notes.append(
            f"the text tower starts with random weights: those of {text.config.name_or_path}, "
            "which OpenCLIP would download, are not (--pretrained loads a file of the whole model)"
        )
    return notes


def batch_norm_notes(config: TrainConfig, towers: Towers, ranks: int) -> list[str]:
    """A warning about batch statistics, if the model has batch normalisation."""
    layers = len(batch_norms(set_modes(towers.module)))
    if not layers:
        return []
    rows = min(unmeasured_micro_batch(config), -(-config.global_batch_size // ranks))
    alone = " on each process alone, and keeps rank 0's running statistics" if ranks > 1 else ""
    return [
        f"warning: {config.model} has batch normalisation ({plural(layers, 'layer')}). It "
        f"normalises over {plural(rows, 'pair')} at a time{alone}: --micro-batch-size changes "
        "what is learnt"
    ]


def train_transform(config: TrainConfig, towers: Towers) -> Callable[[Any], torch.Tensor]:
    """The transform of first inputs in training, with the requested resize."""
    if config.image_resize == "pillow":
        return towers.train_transform
    try:
        return TorchResize(towers.train_transform)
    except ValueError as error:
        raise UsageError(
            f"--image-resize torch: the transform of {config.model} is not OpenCLIP's (a random "
            "crop and nothing else); expected pillow"
        ) from error


def kind_problems(config: TrainConfig, given: str, taken: str) -> list[str]:
    """Reasons why the first inputs of pairs, "image" or "text", do not suit the model."""
    if config.decode == "late" and taken == "text":
        return [f"--decode late: {config.model} takes texts, which are not decoded"]
    if given == taken:
        return []
    hint = " (--csv-query-key names the column of first texts)" if taken == "text" else ""
    return [
        f"--model {config.model}: it takes {taken}s with texts, but {config.train_data} "
        f"has {given}s{hint}"
    ]


def length_problems(config: TrainConfig, pairs: int, ranks: int = 1) -> list[str]:
    """Reasons why a data set with this many pairs per epoch is too small for the run."""
    if config.global_batch_size < 1:
        return []
    batch = with_value("global_batch_size", config.global_batch_size)
    if config.global_batch_size < ranks:
        return [f"{batch}: expected at least 1 for each of {ranks} processes"]
    if config.global_batch_size > pairs:
        return [f"{batch}: expected at most {pairs}, the pairs that there are"]
    return [conflict.reason for conflict in too_short(config, pairs)]


def too_short(config: TrainConfig, pairs: int) -> list[Conflict]:
    """Conflicts between the run's length, with this many pairs per epoch, and its schedule."""
    if config.global_batch_size < 1:
        return []
    return length_conflicts(config, _total_steps(config, pairs))


def length_notes(config: TrainConfig, total_steps: int) -> list[str]:
    """A line on a warm-up that is shorter than the default."""
    warmup = warmup_steps(config, total_steps)
    if config.warmup is not None or warmup == DEFAULT_WARMUP:
        return []
    return [f"the warm-up takes {warmup} of {plural(total_steps, 'step')} (--warmup changes it)"]


def open_data(config: TrainConfig) -> PairDataset:
    """The configuration's training data; raises a UsageError if they cannot be opened."""
    factors = config.train_data_upsampling_factors
    with naming("--train-data"):
        return open_pairs(
            config.train_data,
            upsampling_factors=None if factors is None else parse_factors(factors),
            image_column=config.csv_img_key,
            query_column=config.csv_query_key,
            caption_column=config.csv_caption_key,
            separator=config.csv_separator,
            negatives=config.hard_negatives > 0,
            negative_column=config.csv_negative_key,
        )


def data_for_plan(
    config: TrainConfig, dataset: PairDataset, towers: Towers
) -> tuple[float | None, TextLengths | None]:
    """Mean bytes of image files that are decoded late, and lengths of texts, if they count."""
    cut = config.trim_texts and towers.lengths
    files = mean_bytes(dataset) if config.decode == "late" else None
    return files, sampled_lengths(dataset, towers) if cut else None


def build_towers(config: TrainConfig) -> Towers:
    """Build the configuration's model, load its weights and lock its towers.

    Raises:
        UsageError: the model cannot be built, or cannot be trained as configured.
    """
    options = ModelOptions.of(to_dict(config))
    towers = create(config.model, pretrained=config.pretrained, options=options)
    module = towers.module
    if config.pretrained_image_path is not None:
        load_tower(module, "image", config.pretrained_image_path)
    if config.pretrained_text_path is not None:
        load_tower(module, "text", config.pretrained_text_path)
    if config.lock_image:
        unlocked = config.lock_image_unlocked_groups
        lock(module, "image", unlocked=unlocked, freeze_bn_stats=config.lock_image_freeze_bn_stats)
    if config.lock_text:
        lock(module, "text", unlocked=config.lock_text_unlocked_layers)
    _freeze_unused(config, module)
    if config.layer_decay is not None and not layer_ids(module):
        raise UsageError(f"--layer-decay: {config.model} has no numbered layers")
    if max(config.matryoshka_dims, default=0) > towers.embed_dim:
        raise UsageError(
            f"--matryoshka-dims {max(config.matryoshka_dims)}: the features of {config.model} "
            f"have only {towers.embed_dim}"
        )
    return towers


def _freeze_unused(config: TrainConfig, module: nn.Module) -> None:
    """Freeze a scale or bias on which the loss does not depend: DDP would wait for its gradient.

    A bias cancels in a softmax.
    """
    if is_reference(config.loss):
        takes = create_objective(config, group="local").takes
    else:  # not by the loss itself, which other settings, checked later, may not allow
        takes = frozenset(TRAINABLE[config.loss].takes)
    bias = getattr(module, "logit_bias", None)
    if bias is not None and "logit_bias" not in takes:
        bias.requires_grad_(False)
    if not takes & {"logit_scale", "temperature"}:
        module.get_parameter("logit_scale").requires_grad_(False)


def _check_loss(setup: Setup) -> None:
    """Raise a UsageError if a loss of the user's own cannot be trained with; see `check_custom`."""
    config, towers, device = setup.config, setup.towers, setup.world.device
    has_bias = getattr(towers.module, "logit_bias", None) is not None
    objective = create_objective(config).to(device)
    check_custom(objective, config.loss, towers.embed_dim, device, has_bias=has_bias)


def _total_steps(config: TrainConfig, pairs: int) -> int:
    return config.steps or config.epochs * (pairs // config.global_batch_size)


def _attempt(reasons: list[str], make: Callable[[], T]) -> T | None:
    try:
        return make()
    except UsageError as error:
        reasons.append(str(error))
        return None
