"""Preparation of a run: opens the data, builds the model, and finds all errors beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from megabatch.config.file import to_dict
from megabatch.config.objective import create_objective
from megabatch.config.settings import (
    TrainConfig,
    activation_bytes,
    problems,
    schedule_problems,
    unmeasured_micro_batch,
    with_precision,
)
from megabatch.data import PairDataset, PairLoader
from megabatch.data.late import mean_bytes
from megabatch.data.order import largest_batch, order_of
from megabatch.data.sources import open_configured
from megabatch.errors import UsageError, all_of, naming, plural
from megabatch.losses.registry import TRAINABLE
from megabatch.models import ModelOptions, Towers, create, names
from megabatch.models.float8 import check_float8
from megabatch.models.images import TorchResize
from megabatch.models.towers import lock, set_modes
from megabatch.options import is_reference, option
from megabatch.planning.micro_batches import TextLengths, sampled_lengths
from megabatch.training import evaluating, trackers
from megabatch.training.micro_batch import batch_norms
from megabatch.training.optimizer import DEFAULT_WARMUP, warmup_steps
from megabatch.training.run_folder import folder_problems
from megabatch.training.world import World

#: Settings that may differ between ranks: paths on each one's machine, its memory and its speed.
_OF_A_RANK = (
    *("output", "pretrained", "train_data", "val_data"),
    *("micro_batch_size", "micro_batch_tokens", "workers", "torchcompile"),
    *("data_timeout", "dist_timeout"),
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


def prepare(config: TrainConfig, world: World | None = None) -> Setup:
    """Open the data, build the model, and check the configuration.

    Args:
        config: the run's settings.
        world: its processes. Default: this one, on the CPU.

    Raises:
        UsageError: the run is impossible, here or on another rank.
    """
    world = world or World(torch.device("cpu"))
    setup = world.attempt(lambda: _prepare(config, world))
    _check_ranks(setup)
    return setup


def _prepare(config: TrainConfig, world: World) -> Setup:
    """As `prepare`, on this rank: the settings, the data, the model, and then the loader."""
    if reasons := problems(config, "model", "train_data"):
        raise UsageError(all_of(reasons))
    notes = []
    if config.precision == "auto":
        config = with_precision(config, world.device.type)
        if config.precision == "fp32":
            notes.append("--precision auto: fp32, as this CPU has no fast bf16 products")
    if world.device.type == "cpu" and config.plan == "off" and activation_bytes(config, "cpu"):
        asked = f"--activation-memory {config.activation_memory}"
        raise UsageError(f"{asked}: on the CPU it needs a plan, which --plan off omits")
    if world.main and (reasons := folder_problems(config) + trackers.problems(config)):
        raise UsageError(all_of(reasons))
    if config.torchcompile is None:
        config = replace(config, torchcompile=world.device.type == "cuda")
        if config.torchcompile:
            notes.append("the towers are compiled in the first steps (--no-torchcompile: not)")

    dataset = open_data(config)
    order = order_of(dataset, config.global_batch_size)
    total_steps = config.steps or config.epochs * (order.pairs // config.global_batch_size)
    if reasons := length_problems(config, dataset, total_steps, world.size):
        # Damaged sources may be the reason.
        damage = [f"damaged: {line}" for line in getattr(dataset, "damage", [])]
        raise UsageError(all_of(reasons + damage))

    torch.manual_seed(config.seed)
    towers = build_towers(config)
    transform = train_transform(config, towers)
    check_kind(config, getattr(dataset, "first", "image"), towers.first)
    check_micro_batches(config, towers)
    evaluating.check(config, towers.first)
    notes += model_notes(config, towers, world.size)
    if config.precision == "fp8":
        notes.append(check_float8(towers.module, world.device))
    if order.block > 1:
        counts = ", ".join(str(drawn // order.block) for drawn in order.drawn)
        rest = plural(sum(part.drawn for part in order.parts) - order.pairs, "pair")
        notes.append(f"each batch is from one source: {counts} an epoch, which leaves out {rest}")
    warmup = warmup_steps(config, total_steps)
    if config.warmup is None and warmup < DEFAULT_WARMUP:
        of = plural(total_steps, "step")
        notes.append(f"the warm-up takes {warmup} of {of} (--warmup changes it)")

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
    return Setup(config, world, towers, loader, total_steps, notes)


def _check_ranks(setup: Setup) -> None:
    """Raise a UsageError, on all ranks, if their settings or their numbers of pairs differ.

    Ranks read the settings of a resumed run from its folder, and their data, each for itself. With
    others than rank 0's they would draw their shares from another order of the pairs, or update
    their replicas differently.
    """
    settings = to_dict(setup.config).items()
    own = {option(name): value for name, value in settings if name not in _OF_A_RANK}
    tables = setup.world.gather({**own, "number of pairs": len(setup.loader.dataset)})
    for rank, table in enumerate(tables):
        for name, value in table.items():
            if value != tables[0][name]:
                raise UsageError(
                    f"the processes differ: {name} is {value} on rank {rank}, {tables[0][name]} on "
                    "rank 0; expected the same options, --config, --resume folder and data"
                )


def model_notes(config: TrainConfig, towers: Towers, ranks: int = 1) -> list[str]:
    """Lines on what a user may not expect of a model: its padding, weights, batch statistics."""
    notes = weight_notes(config)
    if config.trim_texts and "text" not in towers.lengths:
        notes.append(f"texts keep their padding: features of {config.model} may depend on it")
    # OpenCLIP's trainer starts such a tower with the weights that its name stands for.
    text: Any = getattr(towers.module, "text", None)
    loaded = config.pretrained or ":" in config.model
    if not loaded and type(text).__name__ == "HFTextEncoder":
        notes.append(
            f"the text tower starts with random weights: those of {text.config.name_or_path}, "
            "which OpenCLIP would download, are not (--pretrained loads a file of the whole model)"
        )
    if layers := len(batch_norms(set_modes(towers.module))):
        rows = min(unmeasured_micro_batch(config), -(-config.global_batch_size // ranks))
        alone = " on each process alone, and keeps rank 0's running statistics" if ranks > 1 else ""
        notes.append(
            f"warning: {config.model} has batch normalisation ({plural(layers, 'layer')}). It "
            f"normalises over {plural(rows, 'pair')} at a time{alone}: --micro-batch-size changes "
            "what is learnt"
        )
    return notes


def weight_notes(config: TrainConfig) -> list[str]:
    """A line on the learning rate of a model that starts with weights, unless it was chosen."""
    source = config.model if config.pretrained is None else f"--pretrained {config.pretrained}"
    trained = names.is_trained(config.model) or config.pretrained is not None
    if not trained and config.model.startswith(names.OPENCLIP):
        return [f"{config.model} has no weights: they start random"]
    if not trained or config.lock_image or config.lock_text:
        return []
    if config.lr == TrainConfig.lr:
        return [
            f"{source} has weights, but --lr {config.lr} is meant for random ones; "
            "fine-tuning usually takes 1e-5 to 1e-4"
        ]
    return []


def train_transform(config: TrainConfig, towers: Towers) -> Callable[[Any], Any]:
    """The transform of first inputs in training, with the requested resize."""
    transform = towers.train_transform
    if config.decode == "late" and (
        hasattr(transform, "collate") or hasattr(transform, "from_bytes")
    ):
        raise UsageError(
            f"--decode late: {config.model} takes inputs of different lengths, which are sorted by "
            "length before they are encoded, or sounds; expected early"
        )
    if config.image_resize == "pillow":
        return towers.train_transform
    try:
        return TorchResize(towers.train_transform)
    except ValueError as error:
        raise UsageError(
            f"--image-resize torch: the transform of {config.model} is not OpenCLIP's (a random "
            "crop and nothing else); expected pillow"
        ) from error


def check_kind(config: TrainConfig, given: str, taken: str) -> None:
    """Raise a UsageError if the first inputs of pairs, "image" or "text", do not suit the model."""
    if config.decode == "late" and taken == "text":
        raise UsageError(f"--decode late: {config.model} takes texts, which are not decoded")
    if given != taken:
        hint = " (--csv-query-key names the column of first texts)" if taken == "text" else ""
        raise UsageError(
            f"--model {config.model}: it takes {taken}s with texts, but {config.train_data} "
            f"has {given}s{hint}"
        )


def check_micro_batches(config: TrainConfig, towers: Towers) -> None:
    """Raise a UsageError if the model's inputs cannot be divided as `micro_batch_tokens` says."""
    if config.micro_batch_tokens is None:
        return
    given = f"--micro-batch-tokens {config.micro_batch_tokens}"
    if not (config.trim_texts and towers.lengths):
        raise UsageError(
            f"{given}: texts of {config.model} keep their padding (--no-trim-texts, or features "
            "may depend on it), so all are equally long; expected --micro-batch-size"
        )
    size = config.micro_batch_size
    images = towers.first == "image" and "image" not in towers.lengths
    if images == (size == "auto"):
        why = "a number of images" if images else "auto, as all inputs have tokens"
        raise UsageError(f"--micro-batch-size {size}: expected {why}, with {given}")


def length_problems(config: TrainConfig, dataset: PairDataset, steps: int, ranks: int) -> list[str]:
    """Reasons why a data set is too small for the run."""
    batch = f"--global-batch-size {config.global_batch_size}"
    if config.global_batch_size < ranks:
        return [f"{batch}: expected at least 1 for each of {ranks} processes"]
    most, which = largest_batch(dataset)
    if config.global_batch_size > most:
        return [f"{batch}: expected at most {most}, {which}"]
    return schedule_problems(config, steps)


def open_data(config: TrainConfig) -> PairDataset:
    """The configuration's training data; raises a UsageError if they cannot be opened."""
    with naming("--train-data"):
        return open_configured(config.train_data, config, negatives=config.hard_negatives > 0)


def data_for_plan(
    config: TrainConfig, dataset: PairDataset, towers: Towers
) -> tuple[float | None, TextLengths]:
    """Mean bytes of image files that are decoded late, and lengths of texts, if they are cut."""
    cut = config.trim_texts and towers.lengths
    files = mean_bytes(dataset) if config.decode == "late" else None
    mixed = config.train_data_batches == "mixed"  # else the source with the longest texts counts
    sources: list[Any] = [dataset] if mixed else getattr(dataset, "datasets", [])
    lengths = [sampled_lengths(source, towers) for source in sources if cut] or [TextLengths()]
    return files, max(lengths, key=lambda one: sum(np.mean(n) for n in one.samples.values()))


def build_towers(config: TrainConfig) -> Towers:
    """Build the configuration's model, load its weights and lock its towers.

    Raises:
        UsageError: the model cannot be built, or cannot be trained as configured.
    """
    options = ModelOptions.of(to_dict(config))
    towers = create(config.model, pretrained=config.pretrained, options=options)
    module = towers.module
    if config.lock_image:
        lock(module, "image", unlocked=config.lock_image_unlocked_groups)
    if config.lock_text:
        lock(module, "text", unlocked=config.lock_text_unlocked_layers)
    _freeze_unused(config, module)
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
