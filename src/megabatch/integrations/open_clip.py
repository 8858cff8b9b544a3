"""OpenCLIP's own trainer with megabatch's losses and gradient caching.

    torchrun --nproc-per-node 8 -m megabatch.integrations.open_clip OPTIONS

OPTIONS are those of `open_clip_train.main`, which runs unmodified, except for two functions that it
looks up by name: `create_loss`, and `train_one_epoch` if `--accum-freq` is above 1. None of its
code is copied. With accumulation their `train_one_epoch` runs with `accum_freq=1`, a loader that
joins the batches of a step, and in place of the model a function that does a whole step of
`GradientCache`. docs/integrations/open_clip.md lists all differences.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import open_clip
import open_clip.loss
import torch
from open_clip_train import main as trainer
from torch import Tensor, nn

import megabatch
from megabatch.ahead import one_ahead
from megabatch.errors import UsageError
from megabatch.gradient_cache import GradientCache
from megabatch.losses import ClipLoss, DistillClipLoss, SigLipLoss
from megabatch.similarity.distributed.means import sum_over_ranks

#: Releases of open_clip_torch whose trainer this was tested with.
TESTED = "3.1 to 3.3"

#: OpenCLIP's losses and the ones that replace them.
LOSSES: dict[type[nn.Module], Callable[[], nn.Module]] = {
    open_clip.loss.ClipLoss: ClipLoss,
    open_clip.loss.SigLipLoss: SigLipLoss,
    open_clip.loss.DistillClipLoss: DistillClipLoss,
}


def main(argv: Sequence[str]) -> Any:
    """Run OpenCLIP's trainer.

    Args:
        argv: its options, as after `python -m open_clip_train.main`.

    Returns:
        The result of its `main`: None, or -1 if it did not start.

    Raises:
        UsageError: an option cannot be honoured.
        ImportError: the installed release lacks a function that this needs.
    """
    check(_original("parse_args")(list(argv)))
    create, train = _original("create_loss"), _original("train_one_epoch")
    with _replaced(
        create_loss=functools.partial(create_loss, create),
        train_one_epoch=functools.partial(train_one_epoch, train),
    ):
        return trainer.main(list(argv))


def check(args: Namespace) -> None:
    """Refuse options that cannot have OpenCLIP's meaning here.

    Raises:
        UsageError: names the option, the reason and the alternative.
    """
    if args.horovod:
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


def create_loss(original: Callable[[Namespace], nn.Module], args: Namespace) -> nn.Module:
    """The loss that replaces the one `original` creates for these options.

    Raises:
        UsageError: there is none.
    """
    theirs = original(args)
    if type(theirs) not in LOSSES:
        raise UsageError(
            f"{type(theirs).__name__}: megabatch has no counterpart of this loss; train with "
            "python -m open_clip_train.main"
        )
    ours = LOSSES[type(theirs)]()
    # OpenCLIP logs rank 0's value: the loss of all pairs, or that rank's share of it.
    share = args.world_size == 1 or getattr(theirs, "local_loss", True)
    if args.rank == 0:
        for level, line in _explanations(type(theirs).__name__, args):
            logging.log(level, f"megabatch {megabatch.__version__}: {line}")
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
        model = CachedStep(model, loss, args.batch_size, args.device)
        loss = model.loss
        batches = data["train"].dataloader
        loader = JoinedBatches(batches, args.accum_freq, ahead=args.workers > 0)
        data = data | {"train": dataclasses.replace(data["train"], dataloader=loader)}
        args = copy.copy(args)
        args.accum_freq, args.batch_size = 1, args.batch_size * args.accum_freq
    original(
        model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args,
        tb_writer=tb_writer,
    )  # fmt: skip


class CachedStep:
    """Stands for a model whose output is the loss of a whole step; otherwise it is that model.

    OpenCLIP's `train_one_epoch` calls it and hands its output to `loss`, which is its method here.
    """

    def __init__(
        self, model: Any, loss: Callable[..., Tensor], micro_batch_size: int, device: str
    ) -> None:
        self._model = model
        self._loss = loss
        self._scale: Tensor | None = None
        self._step = GradientCache(model, self._loss_of, micro_batch_size, device=device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, images: HeldBatches, texts: HeldBatches) -> dict[str, Any]:
        """The first pass and the loss: `{"total": loss, "logit_scale": the model's}`."""
        return {"total": self._step(images, texts), "logit_scale": self._scale}

    @staticmethod
    def loss(total: Tensor, logit_scale: Tensor, output_dict: bool) -> dict[str, Tensor]:
        """The loss under the name that OpenCLIP logs."""
        return {"contrastive_loss": total}

    def _loss_of(self, **outputs: Tensor) -> Tensor:
        self._scale = outputs["logit_scale"].detach()
        return self._loss(**outputs)


class JoinedBatches:
    """A loader's batches, `count` at a time joined into one; left-over batches are dropped, as in
    OpenCLIP.

    With `ahead` a thread loads those of the next step as soon as batches of the current one have
    been encoded for the last time. So the host never holds more than `count`, apart from the
    loader's own. The loader must have processes: without any, its augmentation would draw from the
    same random generator as the step, which sets it back for the second pass.
    """

    def __init__(self, loader: Any, count: int, *, ahead: bool) -> None:
        self._loader, self._count, self._ahead = loader, count, ahead
        self.num_batches = loader.num_batches // count
        self.num_samples = loader.num_samples

    def __iter__(self) -> Iterator[tuple[HeldBatches, ...]]:
        batches = iter(self._loader)
        room = threading.Semaphore(self._count)
        stop = threading.Event()

        def load(_: None) -> list[Sequence[Tensor]]:
            joined: list[Sequence[Tensor]] = []
            while len(joined) < self._count and room.acquire() and not stop.is_set():
                if (batch := next(batches, None)) is None:
                    break
                joined.append(batch)
            return joined

        steps: Generator[list[Sequence[Tensor]], None, None]
        steps = (load(None) for _ in itertools.repeat(None))
        if self._ahead:
            steps = one_ahead(load, itertools.repeat(None), "megabatch-joined-batches")
        try:
            for joined in steps:
                if len(joined) < self._count:
                    return
                images, *others = map(HeldBatches, zip(*joined, strict=True))
                images.when_freed = room.release
                joined.clear()
                yield images, *others
                # OpenCLIP's loop holds references to these until it gets the next ones.
                for batch in (images, *others):
                    batch.release()
        finally:
            stop.set()
            room.release(self._count)
            steps.close()


class HeldBatches:
    """Equally large batches one after another, each moved to the device when it is encoded.

    OpenCLIP's trainer moves what its loader gives; this stays on the host until `GradientCache`
    takes its rows, a batch at a time. It does so twice, and a batch is freed with the second time.

    Attributes:
        when_freed: called after each batch that is freed.
    """

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self._batches: list[Tensor | None] = [*batches]
        self._size, self._rows = len(batches[0]), sum(map(len, batches))
        self._encoded = [0] * len(batches)
        self._dtype: torch.dtype | None = None
        self.when_freed: Callable[[], None] = lambda: None

    def to(
        self, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> HeldBatches:
        """Convert to the dtype later, as rows are taken; the device is `GradientCache`'s."""
        self._dtype = dtype
        return self

    def release(self) -> None:
        """Free the batches that are still there."""
        for number in range(len(self._batches)):
            self._free(number)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: slice) -> Tensor:
        number = rows.start // self._size  # no slice spans two batches
        batch = self._batches[number]
        if batch is None:
            raise RuntimeError(
                f"rows {rows.start} to {rows.stop}: encoded twice already, and freed"
            )
        self._encoded[number] += 1
        if self._encoded[number] == 2:
            self._free(number)
        start = number * self._size
        taken = batch[rows.start - start : rows.stop - start]
        return taken if self._dtype is None else taken.to(self._dtype)

    def _free(self, number: int) -> None:
        if self._batches[number] is not None:
            self._batches[number] = None
            self.when_freed()


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
        "gradients are those of the mean loss of all ranks, whatever --gather-with-grad says; "
        "--local-loss logs rank 0's share of it instead of all",
    )
    if not args.gather_with_grad and args.grad_clip_norm is not None:
        yield (
            logging.WARNING,
            f"--grad-clip-norm {args.grad_clip_norm}: without --gather-with-grad OpenCLIP's own "
            "gradients are too small (without --local-loss, the towers' by a factor of the number "
            f"of ranks, {args.world_size}), so these are clipped more often",
        )


def _original(name: str) -> Any:
    if not hasattr(trainer, name):
        raise ImportError(
            f"open_clip_torch {open_clip.__version__}: open_clip_train.main has no {name}, which "
            f"this needs; it was tested with open_clip_torch {TESTED}"
        )
    return getattr(trainer, name)


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
