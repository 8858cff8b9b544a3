"""OpenCLIP's own trainer with megabatch's losses and gradient caching.

    torchrun --nproc-per-node 8 -m megabatch.integrations.open_clip OPTIONS

OPTIONS are those of `open_clip_train.main`, which runs unmodified, except for two functions that it
looks up by name: `create_loss`, in OpenCLIP 4 `create_task`, and `train_one_epoch` if
`--accum-freq` is above 1. None of its code is copied. With accumulation their `train_one_epoch`
runs with `accum_freq=1`, a loader that joins the batches of a step, and in place of the model or
task a function that does a whole step of `GradientCache`. docs/integrations/open_clip.md lists all
differences.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import open_clip
import open_clip.loss
import torch
from open_clip_train import main as trainer
from torch import Tensor, nn

import megabatch
from megabatch.errors import UsageError
from megabatch.gradient_cache import GradientCache
from megabatch.integrations.joined_batches import HeldBatches, JoinedBatches
from megabatch.losses import ClipLoss, DistillClipLoss, SigLipLoss
from megabatch.similarity import sum_over_ranks

#: Releases of open_clip_torch whose trainer this was tested with.
TESTED = "3.1 to 3.3, and with 4.2.0.dev0 of June 2026"

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
    functions = _functions()
    check(trainer.parse_args(list(argv)))
    with _replaced(**functions):
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
    if "coca" in args.model.lower():
        raise UsageError(
            f"--model {args.model}: CoCa also trains a captioning loss, which megabatch lacks; "
            "train it with python -m open_clip_train.main"
        )
    if args.accum_freq < 1:
        raise UsageError(f"--accum-freq {args.accum_freq}: expected at least 1")
    if args.accum_freq == 1:
        return
    if args.distill_model is not None and args.distill_pretrained is not None:
        raise UsageError(
            f"--accum-freq {args.accum_freq}: OpenCLIP's trainer distils only without "
            "accumulation; leave out --accum-freq or --distill-model"
        )
    if args.ddp_static_graph:
        raise UsageError(
            f"--ddp-static-graph: with --accum-freq {args.accum_freq} gradients are synchronised "
            "in the last micro-batch only, which a static graph does not support; leave it out"
        )
    if getattr(args, "use_naflex", False):
        raise UsageError(
            f"--use-naflex: with --accum-freq {args.accum_freq} the batches of a step would differ "
            "in size, and such batches are not joined here; leave out one of the two options"
        )
    if args.torchcompile and getattr(args, "torchcompile_strategy", "") == "step":
        raise UsageError(
            f"--torchcompile-strategy step: with --accum-freq {args.accum_freq} OpenCLIP does not "
            "compile whole steps; use --torchcompile-strategy model"
        )


# --- OpenCLIP 3: a model and a loss ---------------------------------------------------------------


def create_loss(original: Callable[[Namespace], nn.Module], args: Namespace) -> nn.Module:
    """The loss that replaces the one `original` creates for these options.

    Raises:
        UsageError: there is none.
    """
    theirs = original(args)
    ours = _counterpart(theirs, args)
    # OpenCLIP logs rank 0's value: the loss of all pairs, or that rank's share of it.
    share = args.world_size == 1 or getattr(theirs, "local_loss", True)
    return ours if share else _LoggedMean(ours, args.world_size)


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
    """`original`, the arguments as there, with accumulation by gradient caching."""
    if args.accum_freq > 1:
        model = CachedModel(model, model, loss, args)
        loss = model.loss
        data, args = _joined(data, args)
    original(
        model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args,
        tb_writer=tb_writer,
    )  # fmt: skip


# --- OpenCLIP 4: a task, which has both -----------------------------------------------------------


def create_task(original: Callable[..., Any], args: Namespace, **parts: Any) -> Any:
    """The task that `original` creates for these options, with another loss.

    Raises:
        UsageError: there is no such loss.
    """
    task = original(args, **parts)
    if type(task).__name__ not in TASKS:
        raise UsageError(_no_counterpart(task))
    task.loss = _counterpart(task.loss, args)
    return task


def train_one_epoch_of_task(
    original: Callable[..., None],
    state: Any,
    data: dict[str, Any],
    args: Namespace,
    tb_writer: Any = None,
) -> None:
    """`original`, the arguments as there, with accumulation by gradient caching."""
    task = state.task
    if args.accum_freq > 1:
        state.task = CachedTask(task, task.trainable_module, task.loss, args, task.data_keys)
        data, args = _joined(data, args)
    try:
        original(state, data, args, tb_writer=tb_writer)
    finally:
        state.task = task


# --- both -----------------------------------------------------------------------------------------


class CachedStep:
    """Stands for a model or a task; the batch that it is called with is that of a whole step."""

    def __init__(
        self,
        stands_for: Any,
        model: nn.Module,
        loss: Callable[..., Tensor],
        args: Namespace,
        names: Sequence[str] = (),
    ) -> None:
        self._stands_for = stands_for
        self._loss = loss
        self._report: dict[str, Tensor] = {}
        self._step = GradientCache(
            model, self._loss_of, args.batch_size, device=args.device, input_names=names
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stands_for, name)

    def _loss_of(self, **outputs: Tensor) -> Tensor:
        scalars = outputs.keys() & {"logit_scale", "logit_bias"}
        self._report = {name: outputs[name].detach() for name in scalars}
        return self._loss(**outputs)


class CachedModel(CachedStep):
    """A model whose output is the loss, which OpenCLIP 3 hands to `loss`, a method here."""

    def __call__(self, images: HeldBatches, texts: HeldBatches) -> dict[str, Any]:
        """The first pass and the loss: `{"total": loss, "logit_scale": the model's}`."""
        total = self._step(images, texts)
        return {"total": total, "logit_scale": self._report["logit_scale"]}

    @staticmethod
    def loss(total: Tensor, logit_scale: Tensor, output_dict: bool) -> dict[str, Tensor]:
        """The loss under the name that OpenCLIP logs."""
        return {"contrastive_loss": total}


class CachedTask(CachedStep):
    """A task, which OpenCLIP 4 calls with the batch that the task has prepared."""

    def prepare_batch(
        self, batch: dict[str, HeldBatches], device: torch.device, input_dtype: torch.dtype | None
    ) -> dict[str, HeldBatches]:
        """The inputs of the model, on the host still."""
        return {name: batch[name].to(device, input_dtype) for name in self.data_keys}

    def __call__(self, batch: dict[str, HeldBatches]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The first pass: the loss, in all and in parts, and the numbers that OpenCLIP logs."""
        loss = self._step(**batch)
        return {"contrastive_loss": loss, "loss": loss}, self._report


def _joined(data: dict[str, Any], args: Namespace) -> tuple[dict[str, Any], Namespace]:
    """The data and options of a run whose batches are whole steps."""
    loader = JoinedBatches(data["train"].dataloader, args.accum_freq, ahead=args.workers > 0)
    data = data | {"train": dataclasses.replace(data["train"], dataloader=loader)}
    args = copy.copy(args)
    args.accum_freq, args.batch_size = 1, args.batch_size * args.accum_freq
    return data, args


class _LoggedMean(nn.Module):
    """A loss with its own gradient and the value of its mean over ranks, which all ranks log."""

    def __init__(self, loss: nn.Module, size: int) -> None:
        super().__init__()
        self.loss, self.size = loss, size

    def forward(self, **outputs: Any) -> Any:
        losses = self.loss(**outputs)
        if not isinstance(losses, dict):
            return self._mean(losses)
        return {name: self._mean(loss) for name, loss in losses.items()}

    def _mean(self, loss: Tensor) -> Tensor:
        own = loss.detach()
        return sum_over_ranks(own, None) / self.size + (loss - own)


def _explanations(theirs: str, args: Namespace) -> Iterator[tuple[int, str]]:
    """Lines of the log, with their levels, on differences from OpenCLIP's own trainer."""
    yield logging.INFO, f"its {theirs} replaces OpenCLIP's"
    if args.accum_freq > 1:
        pairs = args.accum_freq * args.batch_size * args.world_size
        yield (
            logging.INFO,
            f"--accum-freq {args.accum_freq}: gradient caching, one loss of {pairs} pairs a step",
        )
    if args.world_size == 1 or args.siglip:
        return
    yield (
        logging.INFO,
        "gradients are those of the mean loss of all ranks, whatever --gather-with-grad says",
    )
    if not args.gather_with_grad and args.grad_clip_norm is not None:
        yield (
            logging.WARNING,
            f"--grad-clip-norm {args.grad_clip_norm}: without --gather-with-grad OpenCLIP's own "
            "gradients are too small (without --local-loss, the towers' by a factor of the number "
            f"of ranks, {args.world_size}), so these are clipped more often",
        )


def _counterpart(theirs: nn.Module, args: Namespace) -> nn.Module:
    if type(theirs) not in LOSSES:
        raise UsageError(_no_counterpart(theirs))
    if args.rank == 0:
        for level, line in _explanations(type(theirs).__name__, args):
            logging.log(level, f"megabatch {megabatch.__version__}: {line}")
    return LOSSES[type(theirs)]()


def _no_counterpart(theirs: Any) -> str:
    return (
        f"{type(theirs).__name__}: megabatch has no counterpart of this loss; train with "
        "python -m open_clip_train.main"
    )


def _functions() -> dict[str, Callable[..., Any]]:
    """The functions that replace the installed trainer's, by name."""
    found: Any = getattr(trainer, "train_one_epoch", None)
    arguments = [] if found is None else [*inspect.signature(found).parameters]
    for create, train in ((create_loss, train_one_epoch), (create_task, train_one_epoch_of_task)):
        created = getattr(trainer, create.__name__, None)
        if created is not None and arguments == [*inspect.signature(train).parameters][1:]:
            return {
                create.__name__: functools.partial(create, created),
                "train_one_epoch": functools.partial(train, found),
            }
    raise UsageError(
        f"open_clip_torch {open_clip.__version__}: open_clip_train.main is not built as this needs "
        f"it; it was tested with open_clip_torch {TESTED}: pip install 'open_clip_torch>=3.1,<4'"
    )


@contextlib.contextmanager
def _replaced(**functions: Callable[..., Any]) -> Iterator[None]:
    """Let the trainer find these functions under their names."""
    originals = {name: getattr(trainer, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(trainer, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(trainer, name, function)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"megabatch.integrations.open_clip: {error}", file=sys.stderr)
        sys.exit(2)
