"""One training step by gradient caching.

A contrastive loss couples all samples of a batch, so plain gradient accumulation, which sums the
losses of small batches, computes another loss. Gradient caching (Gao et al. 2021, "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup", arXiv 2101.06983) keeps the loss of
the large batch and cuts its backward pass in two where it is thin, at the features:

    features  = encode each micro-batch, without a graph     # O(b d) numbers are kept
    loss      = loss(features);  loss.backward()             # gives d loss / d features
    encode each micro-batch again, with a graph, and send its rows of d loss / d features through

The second forward pass sees the random state of the first, so the two agree also under dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.batches import batch_size, ranks_of, told_by_all
from megabatch.gradient_cache.drift import DriftCheck
from megabatch.gradient_cache.encoding import Encoding
from megabatch.gradient_cache.feed import Feed
from megabatch.gradient_cache.room import Room, to_host
from megabatch.gradient_cache.state import (
    cuda_devices,
    get_random_state,
    parameters_in,
    set_random_state,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Encoder = Callable[..., Any]


class GradientCache:
    """Fills `.grad` with the gradient of a whole batch's loss, one micro-batch at a time.

        step = GradientCache((image_encoder, text_encoder), loss, micro_batch_size=256)
        value = step(images, texts)      # instead of: value = loss(...); value.backward()
        optimizer.step()

    In exact arithmetic the gradient is that of the undivided batch; with dropout, that of one graph
    through the same micro-batches under the same random states. The first pass goes encoder by
    encoder, micro-batch by micro-batch; after the step PyTorch's random state (CPU and CUDA) is as
    that pass and the loss left it. Python's and NumPy's generators are not replayed. Batch
    normalisation normalises each micro-batch by its own statistics, so it is **not exact**; its
    running statistics see each micro-batch once.

    **What an output is.** A tensor whose first dimension is the micro-batch's number of rows, in
    every micro-batch, is per sample: it is concatenated. A tensor of shape () or (1,) is shared by
    all samples (a scale, a bias): it must have the same value in every micro-batch, is taken once,
    and its gradient is sent back in one micro-batch, the last. Anything else is an error. Where all
    micro-batches have one row, shape (1,) counts as shared.

    **A batch of one micro-batch**, on every rank, goes through the encoders once, as in a step
    without gradient caching: its graph waits for the loss.

    **Frozen encoders** run once: where no output requires a gradient there is no second pass. A
    module with trainable parameters is known to need one; for anything else (a locked tower, a
    method, a function) the first pass records a graph until an output requires a gradient. So does
    a locked tower inside one model, below trained modules: the largest modules without trainable
    parameters that give a vector a sample are not run in the second pass, unless something trained
    comes before them or torch.compile has the model in one piece.

    **Several processes.** Under DistributedDataParallel and FSDP2 (`fully_shard`) each wrapped
    module synchronises its gradients once a step, in the last micro-batch of the encoder that it
    belongs to. A rank with fewer micro-batches than another takes part in the rest with one row
    whose outputs are dropped; a rank without any row does so with two rows of ones. Wrappers, and
    batch normalisation, are found inside modules, methods of modules, partials, and among the
    modules that a function refers to; a wrapper hidden deeper still gives right gradients, but
    synchronises in each micro-batch. Encoders that nothing synchronises drift apart: a few weights
    are compared over the ranks at the beginning of the second and the tenth step, and a warning
    names one that differs. The ranks of a group tell each other their sizes by way of their hosts.
    """

    def __init__(
        self,
        encoders: Encoder | Sequence[Encoder],
        loss: Callable[..., Tensor],
        micro_batch_size: int,
        *,
        scaler: torch.amp.GradScaler | None = None,
        group: ProcessGroup | Literal["local"] | None = None,
        device: torch.device | str | None = None,
        feature_dtype: torch.dtype | None = None,
        gradients_on_host: bool | None = None,
    ) -> None:
        """Check and keep the parts of a step.

        Args:
            encoders: a tuple of callables, one per batch, each giving a tensor; or one callable
                that takes all batches and gives a tensor, a tuple or a mapping of tensors. A tuple
                reaches the loss by position, a mapping by keyword. A `None` keeps its position, but
                is left out of a mapping. Every tensor returned, a logit scale too, is cached and
                its gradient sent back through the encoder, so none bypasses DDP or FSDP.
            loss: called as `loss(*outputs, **loss_kwargs)` or `loss(**outputs, **loss_kwargs)`, it
                gives one number. Parameters that it uses directly get their gradients directly.
            micro_batch_size: the rows that an encoder sees at once, at least 1. The last
                micro-batch may be smaller; more than the batch has is legal.
            scaler: a gradient scaler: `.grad` is then that of the scaled loss. The loss returned
                is not scaled.
            group: the ranks that must agree on the number of micro-batches: a process group, `None`
                for the default one where torch.distributed is initialised, or "local" for no
                communication.
            device: where the encoders work. Batches then stay where they are, on the host say, and
                move there micro-batch by micro-batch, the next one while one is computed on; the
                device holds the rows of two micro-batches. None: batches are where they belong.
            feature_dtype: what per-sample outputs of two dimensions and more are kept in; half the
                memory for features, the loss's copies and gradients. Under autocast to the same
                dtype the losses of megabatch give the same values: they cast to it in any case.
            gradients_on_host: whether gradients of features wait on the host for the second pass.
                None: where they would leave too little room, measured, for a micro-batch's
                activations.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: no encoder; micro_batch_size below 1; a feature_dtype that is no floating
                point.
        """
        several = isinstance(encoders, (tuple, list, nn.ModuleList))
        self.encoders = tuple(encoders) if several else None  # type: ignore[arg-type]
        self.model = None if several else encoders
        if several and not self.encoders:
            raise ValueError("encoders: expected at least one, got none")
        for encoder in self.encoders or (self.model,):
            if not callable(encoder):
                raise TypeError(f"encoders: expected callables, got {type(encoder).__name__}")
        if not callable(loss):
            raise TypeError(f"loss: expected a callable, got {type(loss).__name__}")
        if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int):
            kind = type(micro_batch_size).__name__
            raise TypeError(f"micro_batch_size: expected an int, got {kind}")
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size: expected at least 1, got {micro_batch_size}")
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(f"scaler: expected a GradScaler, got {type(scaler).__name__}")
        is_group = torch.distributed.is_available() and isinstance(
            group, torch.distributed.ProcessGroup
        )
        if not (group is None or group == "local" or is_group):
            raise TypeError(f'group: expected a process group, None or "local", got {group!r}')
        self.loss = loss
        self.micro_batch_size = micro_batch_size
        self.scaler = scaler
        self.group = group
        self.device = None if device is None else torch.device(device)
        if not isinstance(feature_dtype, (torch.dtype, type(None))):
            kind = type(feature_dtype).__name__
            raise TypeError(f"feature_dtype: expected a torch.dtype or None, got {kind}")
        if feature_dtype is not None and not feature_dtype.is_floating_point:
            raise ValueError(f"feature_dtype: expected a floating point type, got {feature_dtype}")
        self.feature_dtype = feature_dtype
        self.gradients_on_host = gradients_on_host
        self._room = Room()
        self._drift = DriftCheck()

    @torch.enable_grad()
    def __call__(self, /, *batches: Any, **loss_kwargs: Any) -> Tensor:
        """Add the gradients of the loss of `batches` to `.grad`.

        Args:
            *batches: tensors, or nested mappings, lists and tuples of tensors (or None), all with
                the same number of rows (first dimension). In the place of a tensor may stand an
                object with `__len__` and `__getitem__(slice) -> Tensor`, compressed images say: its
                rows are made when their turn comes, in each pass, and must be the same each time.
                No row is legal where another rank has one.
            **loss_kwargs: passed on to the loss, whole.

        Returns:
            The loss, without a graph and unscaled, shape ().

        Raises:
            TypeError: a batch, an encoder's output or the loss's is of the wrong type.
            ValueError: no row on any rank, or batches of different sizes; an output that is neither
                per sample nor shared; a loss that is not one number or needs no gradient;
                DistributedDataParallel with `static_graph=True`, which knows no `no_sync`.
                All these come before any `.grad` changes. An exception out of an encoder's second
                pass leaves `.grad` incomplete: set the gradients to zero before the next step.
        """
        self._check_number(batches)
        rows = batch_size(batches)
        micro_batches = self._micro_batches(rows)
        encodings = self._encodings(batches, rows)
        if len(micro_batches) == 1 and _distinct(encodings):
            return self._undivided(encodings, micro_batches[0], loss_kwargs)

        for encoding in encodings:
            encoding.forward(micro_batches)
        # Autocast keeps its casts of weights, and one made without a graph passes no gradient on.
        torch.clear_autocast_cache()
        loss = self._loss_and_feature_gradients(encodings, loss_kwargs)

        self._keep_gradients(encodings)

        devices = set().union(*(encoding.devices for encoding in encodings), cuda_devices())
        random_state = get_random_state(devices)
        replayed = [encoding for encoding in encodings if encoding.has_gradients()]
        try:
            for i, encoding in enumerate(replayed):
                again = any(encoding.encoder is later.encoder for later in replayed[i + 1 :])
                encoding.backward(micro_batches, synchronise=not again)
                self._room.measured(encoding.activations)
        finally:
            set_random_state(random_state)
        return loss

    def _undivided(
        self, encodings: list[Encoding], rows: slice, loss_kwargs: dict[str, Any]
    ) -> Tensor:
        """A step whose only micro-batch is the whole batch: its graph can wait for the loss."""
        for encoding in encodings:
            encoding.forward_once(rows)
        loss = self._loss_and_feature_gradients(encodings, loss_kwargs)
        for encoding in encodings:
            encoding.take_gradients(lambda gradient: gradient)
        for encoding in encodings:
            encoding.backward_once(rows)
        return loss

    def _encodings(self, batches: tuple[Any, ...], rows: int) -> list[Encoding]:
        if self.encoders is None:
            feed = Feed(batches, rows, self.device)
            return [Encoding("the model", self.model, feed, self.feature_dtype)]
        return [
            Encoding(f"encoder {i}", encoder, Feed((batch,), rows, self.device), self.feature_dtype)
            for i, (encoder, batch) in enumerate(zip(self.encoders, batches, strict=True))
        ]

    def _check_number(self, batches: tuple[Any, ...]) -> None:
        if not batches:
            raise TypeError("batches: expected at least one, got none")
        if self.encoders is not None and len(batches) != len(self.encoders):
            raise TypeError(
                f"batches: expected one per encoder, {len(self.encoders)}, got {len(batches)}"
            )

    def _micro_batches(self, rows: int) -> list[slice]:
        """Row ranges of the micro-batches; empty ones at the end where other ranks have more."""
        starts = range(0, rows, self.micro_batch_size)
        micro_batches = [slice(start, min(start + self.micro_batch_size, rows)) for start in starts]
        told = self._told_by_all([rows, len(micro_batches)])
        total, most = sum(row[0] for row in told), max(row[1] for row in told)
        if not total:
            raise ValueError("batches: expected at least one row over all processes, got 0")
        return micro_batches + [slice(rows, rows)] * (most - len(micro_batches))

    def _told_by_all(self, counts: list[int]) -> list[list[int]]:
        """Every rank's counts; weights are compared on the way, in a few steps."""
        ranks = ranks_of(self.group)
        if len(ranks) == 1:
            return [counts]
        table = told_by_all([*counts, *self._drift.numbers(self._parameters())], self.group)
        self._drift.compare([row[len(counts) :] for row in table], ranks)
        return table

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The encoders' parameters, with their names for messages."""
        if self.encoders is None:
            yield from parameters_in(self.model).items()
        for i, encoder in enumerate(self.encoders or ()):
            for name, parameter in parameters_in(encoder).items():
                yield f"{name} of encoder {i}", parameter

    def _keep_gradients(self, encodings: list[Encoding]) -> None:
        """Let go of the features; their gradients wait for the second pass where there is room."""
        host = self.gradients_on_host
        if host is None:
            modules = (module for encoding in encodings for module in encoding.modules)
            gradients = (tensor for encoding in encodings for tensor in encoding.large_gradients())
            host = not self._room.suffices(gradients, modules)
        for encoding in encodings:
            encoding.take_gradients(to_host if host else lambda gradient: gradient)

    def _loss_and_feature_gradients(
        self, encodings: list[Encoding], loss_kwargs: dict[str, Any]
    ) -> Tensor:
        """The detached loss; each encoding's cached outputs have their gradients afterwards."""
        if self.encoders is None:
            args, kwargs = encodings[0].arguments()
        else:
            args, kwargs = [encoding.single_output() for encoding in encodings], {}
        loss = self.loss(*args, **kwargs, **loss_kwargs)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss: expected it to return a tensor, got {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(f"loss: expected it to return one number, got shape {(*loss.shape,)}")
        if not loss.requires_grad:
            raise ValueError("loss: the value returned depends on nothing that requires a gradient")
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach().reshape(())


def _distinct(encodings: list[Encoding]) -> bool:
    """Whether no wrapper would see a second forward pass before the backward pass of the first."""
    wrappers = [wrapper for encoding in encodings for wrapper in encoding.wrappers]
    return len(set(wrappers)) == len(wrappers)
