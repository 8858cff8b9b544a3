"""OpenCLIP's own trainer with megabatch's losses and gradient caching.

    torchrun --nproc-per-node 8 -m megabatch.integrations.open_clip OPTIONS

OPTIONS are those of `open_clip_train.main`, which runs unmodified, except for two functions that it
looks up by name: `create_loss`, in OpenCLIP 4 `create_task`, and `train_one_epoch`. None of its
code is copied. With `--accum-freq` above 1, its `train_one_epoch` runs with `accum_freq=1`, a
loader that joins the batches of a step, and in place of the model or task a function that does a
whole step of `GradientCache`. docs/integrations/open_clip.md lists all differences.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import open_clip
import open_clip.loss
import torch
from open_clip_train import main as trainer
from torch import Tensor, nn

import megabatch
from megabatch.errors import UsageError
from megabatch.gradient_cache import GradientCache
from megabatch.losses import ClipLoss, DistillClipLoss, SigLipLoss

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
        argv: its options, as after `python -m open_clip_train.main`.

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
    if arguments != [*inspect.signature(train).parameters][1:]:
        raise UsageError(
            f"open_clip_torch {open_clip.__version__}: open_clip_train.main is not built as this "
            "needs it; it was tested with 3.1 to 3.3, and with 4.2.0.dev0 of June 2026: "
            "pip install 'open_clip_torch>=3.1,<4'"
        )
    check(trainer.parse_args(list(argv)))
    replaced: dict[str, Any] = {
        created: functools.partial(create, getattr(trainer, created)),
        "train_one_epoch": functools.partial(train, theirs),
    }
    with mock.patch.multiple(trainer, **replaced):
        return trainer.main(list(argv))


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
    """`original` of OpenCLIP 3, the arguments as there; with accumulation, batches are steps."""
    if args.accum_freq > 1:
        model = CachedModel(model, model, loss, args)
        loss = model.loss
        data, args = _joined(data, args, (0, 1))
    original(
        model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args,
        tb_writer=tb_writer,
    )  # fmt: skip


def train_one_epoch_of_task(
    original: Callable[..., None],
    state: Any,
    data: dict[str, Any],
    args: Namespace,
    tb_writer: Any = None,
) -> None:
    """`original` of OpenCLIP 4, the arguments as there; with accumulation, batches are steps."""
    task = state.task
    if args.accum_freq > 1:
        state.task = CachedTask(task, task.trainable_module, task.loss, args, task.data_keys)
        data, args = _joined(data, args, task.data_keys)
    try:
        original(state, data, args, tb_writer=tb_writer)
    finally:
        state.task = task


def _joined(data: Any, args: Namespace, names: Sequence[Any]) -> tuple[dict[str, Any], Namespace]:
    """The data and options of a run whose batches are whole steps."""
    loader = JoinedBatches(data["train"].dataloader, args, names)
    data = data | {"train": dataclasses.replace(data["train"], dataloader=loader)}
    args = copy.copy(args)
    args.accum_freq, args.batch_size = 1, args.batch_size * args.accum_freq
    return data, args


class CachedModel:
    """Stands for a model; its output is the loss, which OpenCLIP hands to `loss`, a method here."""

    def __init__(
        self,
        stands_for: Any,
        model: nn.Module,
        loss: Callable[..., Tensor],
        args: Namespace,
        names: Sequence[str] = (),
    ) -> None:
        self._stands_for, self._loss = stands_for, loss
        self._scalars: dict[str, Tensor] = {}
        self._step = GradientCache(
            model, self._loss_of, args.batch_size, device=args.device, input_names=names
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stands_for, name)

    def __call__(self, *batches: Any) -> Any:
        """The first pass and the loss: `{"total": loss, "logit_scale": the model's}`."""
        total = self._step(*batches)
        return {"total": total, "logit_scale": self._scalars["logit_scale"]}

    def _loss_of(self, **outputs: Tensor) -> Tensor:
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
        self, batch: dict[str, Column], device: torch.device, input_dtype: torch.dtype | None
    ) -> dict[str, Column]:
        """The inputs of the model, on the host still."""
        return {name: column.to(device, input_dtype) for name, column in batch.items()}

    def __call__(self, batch: dict[str, Column]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The first pass: the loss, in all and in parts, and the numbers that OpenCLIP logs."""
        loss = self._step(**batch)
        return {"contrastive_loss": loss, "loss": loss}, self._scalars


class JoinedBatches:
    """A loader's batches, those of a step joined into one; left-over batches are dropped.

    A batch is loaded when the first pass needs it, and freed with its second pass. So the host
    holds no more than those of one step, apart from the ones that worker processes prepare
    meanwhile. Without workers the batches of a step are loaded before it: the thread that feeds
    `GradientCache` may not draw the random numbers of their augmentation.
    """

    def __init__(self, loader: Any, args: Namespace, names: Sequence[Any]) -> None:
        """`names`: keys or places of the model's inputs in a batch."""
        self._loader, self._args, self._names = loader, args, names
        self.num_batches = loader.num_batches // args.accum_freq
        self.num_samples = loader.num_samples

    def __iter__(self) -> Iterator[Any]:
        batches = map(self._inputs, self._loader)
        for _ in range(self.num_batches):
            held: list[dict[Any, Any]] = []
            if not self._args.workers:
                held += [next(batches) for _ in range(self._args.accum_freq)]
            columns = {name: Column(name, batches, held, self._args) for name in self._names}
            yield (*columns.values(),) if 0 in columns else columns
        for _ in batches:
            pass

    def _inputs(self, batch: Any) -> dict[Any, Any]:
        return {name: batch[name] for name in self._names}


class Column:
    """The images, or the texts, of a step's batches, on the host until `GradientCache` takes rows.

    OpenCLIP's trainer moves what its loader gives; here, `to` only notes the dtype.
    """

    def __init__(
        self, name: Any, batches: Iterator[Any], held: list[dict[Any, Any]], args: Namespace
    ) -> None:
        """`name`: in each batch; `held`: the batches that are loaded, with all of their columns."""
        self._name, self._batches, self._held = name, batches, held
        self._size, self._count = args.batch_size, args.accum_freq
        self._taken: Counter[int] = Counter()
        self._dtype: torch.dtype | None = None

    def to(
        self, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> Column:
        """Convert numbers to the dtype later, as rows are taken; `GradientCache` moves them."""
        self._dtype = dtype
        return self

    def __len__(self) -> int:
        return self._size * self._count

    def __getitem__(self, rows: slice) -> Tensor:
        number = rows.start // self._size  # micro-batches are the loader's batches
        while len(self._held) <= number:
            self._held.append(next(self._batches))
        batch: Tensor = self._held[number][self._name]
        self._taken[number] += 1
        if self._taken[number] == 2:
            self._held[number][self._name] = None
        return batch.to(self._dtype) if batch.is_floating_point() else batch


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"megabatch.integrations.open_clip: {error}", file=sys.stderr)
        sys.exit(2)
