"""OpenCLIP's own trainer with megabatch's losses and gradient caching.

    torchrun --nproc-per-node 8 -m megabatch.integrations.open_clip OPTIONS

OPTIONS are those of `open_clip_train.main`, which runs unmodified, except for functions that it
looks up by name: `create_loss`, in OpenCLIP 4 `create_task`, and, with `--accum-freq` above 1,
`create_model_and_transforms` and `train_one_epoch`. None of its code is copied. Its
`train_one_epoch` then runs with `accum_freq=1`, a loader that joins the batches of a step, and in
place of the model or task a function that does a whole step of `GradientCache`.
docs/integrations/open_clip.md lists all differences.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any
from unittest import mock

import open_clip
import open_clip.loss
import torch
from open_clip_train import main as trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch.ahead import one_ahead
from megabatch.data.collect import Memory
from megabatch.errors import UsageError
from megabatch.gradient_cache import GradientCache, SortedByLength
from megabatch.losses import ClipLoss, DistillClipLoss, SigLipLoss
from megabatch.models.blocks import compile_blocks, use_fast_blocks
from megabatch.models.images import multiply_patches, with_bytes
from megabatch.models.openclip import accept_short_texts
from megabatch.models.padding import Lengths
from megabatch.options import parse_bytes
from megabatch.training.micro_batch import usable_memory

#: OpenCLIP's losses and the ones that replace them.
LOSSES: dict[type[nn.Module], Callable[[], nn.Module]] = {
    open_clip.loss.ClipLoss: ClipLoss,
    open_clip.loss.SigLipLoss: SigLipLoss,
    open_clip.loss.DistillClipLoss: DistillClipLoss,
}


#: OpenCLIP 4's tasks whose loss is one of these, of the features that a model returns.
TASKS = ("CLIPTask", "SigLIPTask", "DistillCLIPTask")


def main(argv: Sequence[str]) -> Any:
    """Run OpenCLIP's trainer.

    Args:
        argv: its options, as after `python -m open_clip_train.main`, and `--activation-memory`.

    Returns:
        The result of its `main`: None, or -1 if it did not start.

    Raises:
        UsageError: an option cannot be honoured, or the installed release has another interface.
    """
    has_tasks = hasattr(trainer, "create_task")
    created = "create_task" if has_tasks else "create_loss"
    train = train_one_epoch_of_task if has_tasks else train_one_epoch
    theirs: Any = getattr(trainer, "train_one_epoch", None)
    arguments = [] if theirs is None else [*inspect.signature(theirs).parameters]
    if arguments != [*inspect.signature(train).parameters][2:]:
        raise UsageError(
            f"open_clip_torch {open_clip.__version__}: open_clip_train.main is not built as this "
            "needs it; it was tested with 3.1 to 3.3, and with 4.2.0.dev0 of June 2026: "
            "pip install 'open_clip_torch>=3.1,<4'"
        )
    bound, words = activation_memory(argv)
    check(args := trainer.parse_args(words))
    if bound is not None and args.accum_freq == 1:
        raise UsageError(
            f"--activation-memory: expected --accum-freq above 1, got {args.accum_freq}"
        )
    replaced: dict[str, Any] = {created: functools.partial(create, getattr(trainer, created))}
    if args.accum_freq > 1:
        accumulation = Accumulation(args, bound)
        model = functools.partial(accumulation.create_model, trainer.create_model_and_transforms)
        replaced["create_model_and_transforms"] = model
        replaced["train_one_epoch"] = functools.partial(train, theirs, accumulation)
        replaced["parse_args"] = lambda _: args
    with mock.patch.multiple(trainer, **replaced):
        return trainer.main(words)


def activation_memory(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """The bytes of `--activation-memory`, None without it, and OpenCLIP's own options."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--activation-memory")
    ours, words = own.parse_known_args(list(argv))
    size = ours.activation_memory
    try:
        return None if size is None else parse_bytes(size), words
    except ValueError as error:
        raise UsageError(f"--activation-memory: {error}, got {size!r}") from None


def check(args: Namespace) -> None:
    """Refuse options that cannot have OpenCLIP's meaning here.

    Raises:
        UsageError: names the option, the reason and the alternative.
    """
    if getattr(args, "horovod", False):
        raise UsageError(
            "--horovod: the losses exchange features by torch.distributed; start the processes "
            "with torchrun or srun and leave it out"
        )
    step = args.torchcompile and getattr(args, "torchcompile_strategy", "") == "step"
    for applies, reason in (
        (
            args.ddp_static_graph,
            "--ddp-static-graph: gradients are synchronised in the last micro-batch only, which a "
            "static graph does not support",
        ),
        (
            getattr(args, "use_naflex", False),
            "--use-naflex: the batches of a step would differ in size",
        ),
        (step, "--torchcompile-strategy step: OpenCLIP does not compile whole steps"),
    ):
        if applies and args.accum_freq > 1:
            raise UsageError(f"{reason} with --accum-freq {args.accum_freq}; leave out one of them")


def create(original: Callable[..., Any], args: Namespace, **parts: Any) -> Any:
    """The loss, or in OpenCLIP 4 the task, that `original` creates, with megabatch's loss.

    Raises:
        UsageError: there is none.
    """
    created = original(args, **parts)
    if type(created).__name__ not in TASKS:
        return _counterpart(created, args)
    created.loss = _counterpart(created.loss, args)
    return created


def _counterpart(theirs: nn.Module, args: Namespace) -> nn.Module:
    if type(theirs) not in LOSSES:
        raise UsageError(
            f"--model {args.model}: megabatch has no counterpart of {type(theirs).__name__}; "
            "train with python -m open_clip_train.main"
        )
    if args.rank == 0:
        _log_differences(type(theirs).__name__, args)
    return LOSSES[type(theirs)]()


def _log_differences(theirs: str, args: Namespace) -> None:
    pairs = args.accum_freq * args.batch_size * args.world_size
    name = f"megabatch {megabatch.__version__}"
    logging.info(f"{name}: its {theirs} replaces OpenCLIP's, one loss of {pairs} pairs a step")
    with_grad = args.gather_with_grad or args.siglip
    if args.world_size > 1 and not with_grad and args.grad_clip_norm is not None:
        logging.warning(
            f"{name}: --grad-clip-norm {args.grad_clip_norm}: without --gather-with-grad "
            "OpenCLIP's own gradients are too small (without --local-loss, the towers' by a factor "
            f"of the number of ranks, {args.world_size}), so these are clipped more often"
        )


# --- accumulation by gradient caching -------------------------------------------------------------


def train_one_epoch(
    original: Callable[..., None],
    accumulation: Accumulation,
    model: Any,
    data: dict[str, Any],
    loss: Callable[..., Any],
    epoch: int,
    optimizer: Any,
    scaler: Any,
    scheduler: Any,
    dist_model: Any,
    args: Namespace,
    tb_writer: Any = None,
) -> None:
    """`original` of OpenCLIP 3, the arguments as there; batches are steps."""
    encoder = getattr(model, "_orig_mod", model)  # compiled as a whole by --torchcompile
    if args.torchcompile:
        accumulation.compile(encoder)
    cached = CachedModel(model, encoder, loss, accumulation)
    data, args = _joined(data, accumulation, (0, 1))
    original(
        cached, data, cached.loss, epoch, optimizer, scaler, scheduler, dist_model, args,
        tb_writer=tb_writer,
    )  # fmt: skip


def train_one_epoch_of_task(
    original: Callable[..., None],
    accumulation: Accumulation,
    state: Any,
    data: dict[str, Any],
    args: Namespace,
    tb_writer: Any = None,
) -> None:
    """`original` of OpenCLIP 4, the arguments as there; batches are steps."""
    task = state.task
    state.task = CachedTask(
        task, task.trainable_module, task.loss, accumulation, names=task.data_keys
    )
    data, args = _joined(data, accumulation, task.data_keys)
    try:
        original(state, data, args, tb_writer=tb_writer)
    finally:
        state.task = task


def _joined(
    data: Any, accumulation: Accumulation, names: Sequence[Any]
) -> tuple[dict[str, Any], Namespace]:
    """The data and options of a run whose batches are whole steps."""
    loader = JoinedBatches(data["train"].dataloader, accumulation, names)
    data = data | {"train": dataclasses.replace(data["train"], dataloader=loader)}
    args = copy.copy(accumulation.args)
    args.accum_freq, args.batch_size = 1, args.batch_size * args.accum_freq
    return data, args


class Accumulation:
    """What the steps of a run share over all epochs.

    Attributes:
        args: OpenCLIP's options, of which its `main` sets further ones, such as the device.
        lengths: of texts, for the features as they are; None: texts keep their padding.
        kept: micro-batches that are encoded once, as their activations wait for the backward pass.
    """

    def __init__(self, args: Namespace, bound: int | None) -> None:
        """`bound`: the most bytes for kept activations; None: all that the first steps leave."""
        self.args, self.kept = args, 0
        self.lengths: Lengths | None = None
        self._bound, self._compiled = bound, False
        self._measured: list[int] = []

    @functools.cached_property
    def device(self) -> torch.device:
        """Of this process, once OpenCLIP has chosen it."""
        return torch.device(self.args.device)

    @functools.cached_property
    def memory(self) -> Memory:
        """For the batches of a step, and for those of the next one."""
        return Memory(pinned=self.device.type == "cuda")

    def create_model(self, original: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """What `original` creates: a model, here also for bytes and short texts, and transforms.

        Features are the same but for rounding, and weights keep their names.
        """
        model, train, evaluation = original(*given, **options)
        visual = getattr(model, "visual", None)
        if not isinstance(visual, nn.Module) or isinstance(model, torch.jit.ScriptModule):
            return model, train, evaluation
        multiply_patches(visual)
        half = open_clip.get_input_dtype(self.args.precision) is not None
        if not (half or getattr(self.args, "fsdp", False)):  # which convert images
            train, _ = with_bytes(visual, train, evaluation)
            model.to(options["device"])
        if not (self.args.torchcompile and hasattr(trainer, "create_task")):
            self.lengths = accept_short_texts(model)  # which cannot be compiled as a whole
        return model, train, evaluation

    def compile(self, model: nn.Module) -> None:
        """Compile a model's blocks, once: one graph is for all lengths of texts."""
        if not self._compiled:
            module = model.module if isinstance(model, DistributedDataParallel) else model
            use_fast_blocks(module)
            compile_blocks(module, ["text"] if self.lengths else [])
        self._compiled = True

    def between_passes(self, longer: Callable[[], float]) -> None:
        """Find how many micro-batches' activations can be kept, in the third step on a GPU.

        In the second step the optimizer has its state, and nothing is kept; the third has the
        activations of one micro-batch more.
        `longer`: how many times as many tokens a micro-batch of another batch may have.
        """
        if self.device.type != "cuda" or len(self._measured) == 3 or self._bound == 0:
            return
        self._measured.append(torch.cuda.memory_allocated(self.device))
        if len(self._measured) == 2:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.kept = 1
        if len(self._measured) < 3:
            return
        each = max(1.0, longer() * (self._measured[2] - self._measured[1]))
        # The peak has a micro-batch's activations, which may also become larger.
        peak = torch.cuda.max_memory_allocated(self.device)
        left = usable_memory(self.device) - peak - each
        left = left if self._bound is None else min(left, self._bound)
        self.kept = max(0, min(self.args.accum_freq, int(left / each)))
        if self.args.rank == 0:
            logging.info(
                f"megabatch {megabatch.__version__}: the activations of {self.kept} of "
                f"{self.args.accum_freq} micro-batches are kept, {each / 2**20:,.0f} MiB each"
            )


class CachedModel:
    """Stands for a model; its output is the loss, which OpenCLIP hands to `loss`, a method here."""

    def __init__(
        self,
        stands_for: Any,
        model: nn.Module,
        loss: Callable[..., Tensor],
        accumulation: Accumulation,
        names: Sequence[str] = (),
    ) -> None:
        self._stands_for, self._loss, self._accumulation = stands_for, loss, accumulation
        self._scalars: dict[str, Tensor] = {}
        args = accumulation.args
        self._count = args.accum_freq
        self._step = GradientCache(
            model, self._loss_of, args.batch_size, device=args.device, input_names=names
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stands_for, name)

    def __call__(self, *batches: Any) -> Any:
        """The first pass and the loss: `{"total": loss, "logit_scale": the model's}`."""
        total = self._total(*batches)
        return {"total": total, "logit_scale": self._scalars["logit_scale"]}

    def _total(self, *columns: OnHost, **named: OnHost) -> Tensor:
        """The loss of a step's images and texts."""
        given = [column.batch for column in (*columns, *named.values())]
        texts = [batch for batch in given if isinstance(batch, SortedByLength)]
        self._step.kept_micro_batches = self._accumulation.kept
        return self._step(
            *given[: len(columns)],
            **dict(zip(named, given[len(columns) :], strict=True)),
            longer=lambda: max((each.longer(self._count) for each in texts), default=1.0),
        )

    def _loss_of(self, longer: Callable[[], float], **outputs: Tensor) -> Tensor:
        self._accumulation.between_passes(longer)
        names = outputs.keys() & {"logit_scale", "logit_bias"}
        self._scalars = {name: outputs[name].detach() for name in names}
        return self._loss(**outputs)

    @staticmethod
    def loss(total: Tensor, logit_scale: Tensor, output_dict: bool) -> dict[str, Tensor]:
        """The loss under the name that OpenCLIP logs."""
        return {"contrastive_loss": total}


class CachedTask(CachedModel):
    """Stands for a task, which OpenCLIP 4 calls with the batch that the task has prepared."""

    def prepare_batch(
        self, batch: dict[str, OnHost], device: torch.device, input_dtype: torch.dtype | None
    ) -> dict[str, OnHost]:
        """The inputs of the model, on the host still."""
        return {name: column.to(device, input_dtype) for name, column in batch.items()}

    def __call__(self, batch: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The first pass: the loss, in all and in parts, and the numbers that OpenCLIP logs."""
        loss = self._total(**batch)
        return {"contrastive_loss": loss, "loss": loss}, self._scalars


class JoinedBatches:
    """A loader's batches, those of a step joined into one; left-over batches are dropped.

    With worker processes a thread joins the next step's while the GPU is busy with this one's: the
    host has those of two steps, in pinned memory, besides the ones that workers prepare. Without
    workers they are loaded before the step, in the thread whose random numbers augmentation draws.
    """

    def __init__(self, loader: Any, accumulation: Accumulation, names: Sequence[Any]) -> None:
        """`names`: keys or places of the model's inputs in a batch."""
        self._loader, self._accumulation, self._names = loader, accumulation, names
        self.num_batches = loader.num_batches // accumulation.args.accum_freq
        self.num_samples = loader.num_samples

    def __iter__(self) -> Iterator[Any]:
        batches, steps = iter(self._loader), range(self.num_batches)
        joined: Generator[dict[Any, OnHost], None, None]
        if self._accumulation.args.workers:
            joined = one_ahead(lambda _: self._joined(batches), steps, "megabatch-loader")
        else:
            joined = (self._joined(batches) for _ in steps)
        with contextlib.closing(joined):
            for columns in joined:
                yield (*columns.values(),) if 0 in columns else columns
                if self._accumulation.device.type == "cuda":
                    torch.cuda.synchronize(self._accumulation.device)  # copies are complete
                for column in columns.values():  # OpenCLIP still refers to them
                    column.batch = None
        for _ in batches:
            pass

    def _joined(self, batches: Iterator[Any]) -> dict[Any, OnHost]:
        """The columns of a step."""
        args, rows = self._accumulation.args, 0
        dtype = open_clip.get_input_dtype(args.precision)
        joined: dict[Any, Tensor] = {}
        for _ in range(args.accum_freq):
            batch = next(batches)
            for name in self._names:
                part = batch[name]
                part = part.to(dtype) if part.is_floating_point() else part
                if not rows:
                    size = args.batch_size * args.accum_freq
                    joined[name] = self._accumulation.memory.like(part, size, str(name))
                joined[name][rows : rows + args.batch_size] = part
            rows += args.batch_size
            del batch, part  # frees the memory in which a worker has sent them
        columns = {name: OnHost(tensor, rows) for name, tensor in joined.items()}
        if lengths := self._accumulation.lengths:
            texts = columns[1 if 1 in columns else "text"]
            of_each = lengths(texts.batch)
            texts.batch = SortedByLength(texts.batch, of_each, outputs="text_features")
        return columns


class OnHost:
    """A step's images or texts, of which `GradientCache` moves a micro-batch at a time."""

    def __init__(self, batch: Any, rows: int) -> None:
        self.batch, self._rows = batch, rows

    def __len__(self) -> int:
        return self._rows

    def to(
        self, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> OnHost:
        """Stay here, in the dtype of `_joined`, where OpenCLIP's trainer moves its batches."""
        return self


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"megabatch.integrations.open_clip: {error}", file=sys.stderr)
        sys.exit(2)
