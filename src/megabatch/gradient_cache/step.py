"""Gradient caching (Gao et al. 2021, arXiv 2101.06983).

The chain rule splits the gradient of a loss of b x d features with respect to the encoders' weights
at the features, where the graph is thin:

    features  = encode each micro-batch, without a graph     # O(b d) numbers are cached
    loss      = loss(features)                               # its own graph is kept, O(b d)
    loss.backward()                                          # gives d loss / d features, and then:
    encode each micro-batch again, with a graph, and backpropagate its rows of d loss / d features

The second forward pass uses the random states of the first, so both agree even with dropout.

The loss is the output of one autograd node, whose inputs are the trainable parameters, and whose
backward pass consists of the last two lines. So a caller may use it like any loss: scale it, add
another one, pass it to a trainer. The node gets the result of all this as one upstream gradient.
The micro-batches' gradients are summed outside of `.grad` and leave the node together, so that
hooks on parameters, including those of a DistributedDataParallel around the whole training step,
see one gradient per step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megabatch.gradient_cache.arguments import Settings
from megabatch.gradient_cache.autograd import attach
from megabatch.gradient_cache.batches import batch_size
from megabatch.gradient_cache.by_length import Orders, in_encoders_order
from megabatch.gradient_cache.checks import (
    DriftCheck,
    PassesCheck,
    UnusedLoss,
    out_of_memory_on_all_ranks,
)
from megabatch.gradient_cache.division import MicroBatch
from megabatch.gradient_cache.encoding import Encoding
from megabatch.gradient_cache.feed import Feed
from megabatch.gradient_cache.offload import OffloadPolicy, StepMemory
from megabatch.gradient_cache.outputs import OutputForm
from megabatch.gradient_cache.second_pass import SecondPass, checked_loss
from megabatch.gradient_cache.state import parameters_in
from megabatch.ranks import all_gather_numbers, global_ranks
from megabatch.torch_internals import parametrizations_not_cached

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Encoder = Callable[..., Any]


class GradientCache:
    """The loss and exact gradient of a large batch, in the memory of one micro-batch's activations.

        step = GradientCache((image_encoder, text_encoder), loss, micro_batch_size=256)
        value = step(images, texts)      # first pass, and the loss
        value.backward()                 # second pass: .grad is filled
        optimizer.step()

    The value is a loss like any other: divide it for gradient accumulation, let a GradScaler scale
    it, add another cached loss, clip gradients afterwards, or return it from a `training_step` or a
    `compute_loss`. Under `torch.no_grad()` a step only computes the loss.

    In exact arithmetic the gradient is that of the undivided batch; with dropout, that of one graph
    through the same micro-batches with the same random states. The first pass goes encoder by
    encoder, micro-batch by micro-batch. The second pass runs under the same conditions: autocast,
    default dtype and device, float32 matmul precision, train or eval mode, `no_sync`, random
    states. Random states are those of PyTorch's generators (CPU and CUDA), Python's and NumPy's.
    Afterwards they, and buffers that a forward pass updates, are as `backward()` found them. A
    warning appears if an encoder gives different features in the second pass because it depends on
    anything else; a few steps compare those of the first micro-batch. Batch normalisation uses each
    micro-batch's own statistics, so it is **not exact**; its running statistics are updated once by
    each micro-batch.

    **Outputs.** A tensor whose first dimension equals the number of rows in every micro-batch is
    per sample: the micro-batches' tensors are concatenated. A tensor of shape () or (1,) is shared
    by all samples (a scale, a bias): it must have the same value in every micro-batch, is used
    once, and its gradient is backpropagated in the last micro-batch. Anything else is an error. If
    all micro-batches have one row, shape (1,) counts as shared.

    **A single micro-batch.** If every rank and every encoder has only one micro-batch, it is
    encoded once, as in a step without gradient caching: its graph is kept for the backward pass.

    **Kept micro-batches.** With `kept_micro_batches=k` the last k micro-batches of each encoder are
    encoded with a graph in the first pass, and not again: their activations stay in memory, and are
    backpropagated first in the second pass, before others take memory. Gradients are the same up to
    rounding. With DistributedDataParallel and FSDP2 inside, the micro-batch that synchronises is
    always encoded again. With FSDP1, and for encoders with parameters that cannot be found, none
    are kept. If memory runs out on one of several ranks while graphs are kept, all of them raise a
    `torch.OutOfMemoryError`, before any gradient is reduced; after clearing `.grad` they may repeat
    the step with fewer.

    **Frozen encoders** run once: if no output requires a gradient, there is no second pass. A
    module with trainable parameters is known to need one; for anything else (a locked tower, a
    method, a function) the first pass records a graph until an output requires a gradient. A locked
    tower inside a model runs once, too: the second pass skips the largest modules without trainable
    parameters that return a vector per sample, unless something trainable comes before them,
    skipping them could make a difference (a hook inside, attributes that they set), or
    torch.compile has compiled the whole model.

    **Gradients leave together**, when the second pass is done: an exception in it changes no
    `.grad`. (If `.grad` already holds a gradient, and the parameter has no hook, gradients are
    added to it at once, to save memory.) Tensors that `loss` uses directly, including those in
    `loss_kwargs`, get their gradients in the same backward pass.

    **Several processes.** With DistributedDataParallel and FSDP2 (`fully_shard`) each wrapped
    module synchronises its gradients once per step, in the last micro-batch of its encoder. Its
    gradients go to `.grad` in each micro-batch, so `torch.autograd.grad` and
    `backward(inputs=...)` are errors there. A wrapper around the whole training step synchronises
    when the gradients leave the node. A rank with fewer micro-batches than another encodes one row
    for each missing one and drops the outputs; a rank without any row encodes two rows of ones.
    Wrappers, and batch normalisation, are found inside modules and partials, among the modules that
    a function refers to, and among the attributes of an object that is called or whose method is;
    with a wrapper that is hidden deeper, gradients are correct, but it synchronises in each
    micro-batch. Encoders that nothing synchronises drift apart: at the beginning of the second and
    the tenth step a few weights are compared across ranks, and a warning names one that differs.
    The ranks of a group tell each other which call they make; if one skips `backward()`, the errors
    of the others name it.

    `torch.compile` leaves a step out of its graphs; encoders and losses may be compiled. Compiled
    autograd raises an error.
    """

    def __init__(
        self,
        encoders: Encoder | Sequence[Encoder],
        loss: Callable[..., Tensor],
        micro_batch_size: int | Sequence[int],
        *,
        group: ProcessGroup | DeviceMesh | Literal["local"] | None = None,
        device: torch.device | str | None = None,
        feature_dtype: torch.dtype | None = None,
        gradients_on_host: bool | None = None,
        input_names: Sequence[str] = (),
        outputs: int | str | Sequence[int | str] | None = None,
        kept_micro_batches: int | Sequence[int] = 0,
        **unknown: Any,
    ) -> None:
        """Check the arguments.

        Args:
            encoders: a tuple of callables, one per batch, each returning a tensor; or one callable
                that takes all batches and returns a tensor, a tuple or a mapping of tensors. A
                tuple reaches the loss by position, a dict by keyword, another mapping (Hugging
                Face's ModelOutput) as one object of its class. A `None` keeps its position, but is
                left out of a dict. Every returned tensor, even a logit scale, is cached, and its
                gradient is backpropagated through the encoder, so none bypasses DDP or FSDP.
            loss: called as `loss(*outputs, **loss_kwargs)` or `loss(**outputs, **loss_kwargs)`;
                returns one number. Parameters that it uses directly get their gradients directly.
            micro_batch_size: rows per call of an encoder, at least 1; or one number per encoder.
                The last micro-batch may be smaller; the size may exceed the batch. For a
                `SortedByLength`, whose micro-batches have equal numbers of tokens, it is the mean.
            group: the ranks that must agree on the number of micro-batches: a process group, a
                DeviceMesh, `None` for the default group if torch.distributed is initialised, or
                "local" for no communication.
            device: the encoders' device. Batches then stay where they are, for example on the host,
                and are moved micro-batch by micro-batch, each during the computation of the
                previous one; the device holds the rows of two micro-batches. None: batches are not
                moved.
            feature_dtype: dtype of cached per-sample outputs with at least two dimensions; a half
                type halves the memory of features, the loss's copies and gradients. Under autocast
                to the same dtype megabatch's losses give the same values: they cast to it anyway.
            gradients_on_host: whether gradients of features wait on the host for the second pass.
                None: if otherwise, by measurement, a micro-batch's activations would not fit.
            input_names: keywords of a call that are batches. A single model gets them by keyword
                (`("input_ids", "pixel_values")`); several encoders get one each. Other keywords
                are passed to the loss.
            outputs: for models that return more than the loss needs, the keys (or positions) of
                the outputs to be cached; the others are dropped. For several encoders, one key for
                all or one for each.
            kept_micro_batches: how many micro-batches of each encoder, at most, are encoded once,
                with their activations kept in memory for the backward pass; or one number per
                encoder. All ranks use the smallest number. An attribute of this name may be set
                between steps.

        Raises:
            TypeError: an argument has a wrong type; `scaler` is no longer an argument.
            ValueError: there is no encoder; micro_batch_size is below 1; kept_micro_batches is
                negative; feature_dtype is not a floating point type; the number of names, sizes or
                outputs does not match the encoders.
        """
        self._settings = Settings.checked(
            encoders, loss, micro_batch_size, group, device, feature_dtype, input_names, outputs,
            kept_micro_batches, unknown,
        )  # fmt: skip
        self.kept_micro_batches = kept_micro_batches
        self.loss = loss
        self.group = group
        self.gradients_on_host = gradients_on_host
        self._offload = OffloadPolicy()
        self._drift = DriftCheck()
        self._passes = PassesCheck()
        self._steps = 0
        self._keeps = False
        self._last: UnusedLoss | None = None

    def __call__(self, /, *batches: Any, **keywords: Any) -> Tensor:
        """Compute the loss of `batches`; its `backward()` adds their gradients to `.grad`.

        Args:
            *batches: tensors, or nested mappings, lists and tuples of tensors, with the same number
                of rows (first dimension) for each encoder. Instead of a tensor there may be an
                object with `__len__` and `__getitem__(slice) -> Tensor`, such as compressed images:
                its rows are made in each pass, when they are needed, and must be the same each
                time. In addition, a list or tuple of other values with one item per row, such as
                captions, is split along with the tensors; anything else (None, a string, a flag) is
                passed unchanged with each micro-batch. A mapping reaches the encoder as one
                argument: for one that takes keywords pass `lambda batch: model(**batch)`. A batch
                may have no rows if that of another rank has some. Batches must not change until
                `backward()` is done. Padded sequences in a `SortedByLength` are encoded with little
                of their padding.
            **keywords: batches by keyword (`input_names`); the others are passed to the loss, not
                split.

        Returns:
            The loss, shape (). It supports one `backward()`, without `retain_graph` or
            `create_graph`.

        Raises:
            TypeError: a batch, an encoder's output or the loss has a wrong type; an encoder cannot
                take a mapping as one argument, but takes keywords.
            ValueError: no rank has a row, or batches differ in size; an output is neither per
                sample nor shared; the loss is not one number or needs no gradient;
                DistributedDataParallel has `static_graph=True` or `delay_all_reduce_named_params`,
                which do not support `no_sync`; ranks make different calls.
            RuntimeError: an optimizer stepped, but the last step's loss was not backpropagated;
                a forward pass changed a parameter or a batch in place.
                From `backward()`: it was called a second time, or with `retain_graph` or
                `create_graph`; a parameter or a batch was changed in place since the step;
                `torch.autograd.grad` or `inputs=` is used with a wrapper inside the encoders. These
                are raised before any `.grad` changes.
        """
        return _uncompiled_step()(self, batches, keywords)

    @property
    def memory(self) -> StepMemory:
        """GPU memory of the steps so far."""
        return self._offload.memory

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}

    def _step(self, batches: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        training = torch.is_grad_enabled()
        if training and self._last is not None:
            self._last.raise_if_left_out()
        loss_kwargs = {k: v for k, v in keywords.items() if k not in self._settings.input_names}
        encodings = self._encodings(self._settings.named_batches(batches, keywords))
        self._divide(encodings, training)
        return (self._train if training else self._evaluate)(encodings, loss_kwargs)

    def _train(self, encodings: list[Encoding], loss_kwargs: dict[str, Any]) -> Tensor:
        once = all(len(e.micro_batches) == 1 for e in encodings) and _distinct(encodings)
        call = f"GradientCache, backward pass of step {self._steps}"
        second_pass = SecondPass(
            encodings,
            once=once,
            offload=self._offload,
            gradients_on_host=self.gradients_on_host,
            announce=lambda: self._begin_backward(unused, call),
            kept_backward=lambda: self._memory_for_kept("kept graphs"),
        )
        check = self._passes if self._passes.wanted(self._steps) else None
        try:
            # As below: weights that are cached without a graph pass no gradient on.
            with self._memory_for_kept("first pass"), parametrizations_not_cached():
                for encoding in encodings:
                    if once:
                        encoding.forward_once()
                    else:
                        encoding.forward(second_pass=True, check=check)
            second_pass.check_forward_passes()
            # Autocast caches casts of weights; those made without a graph pass no gradient on.
            torch.clear_autocast_cache()
            args, kwargs = self._loss_arguments(encodings)
            value = second_pass.loss_of(self.loss, args, kwargs, loss_kwargs)
            del args, kwargs
        except BaseException:
            for encoding in encodings:  # the traceback refers to them
                encoding.release()
            raise
        self._last = unused = UnusedLoss(second_pass.inputs)
        return attach(value, second_pass.inputs, second_pass)

    def _memory_for_kept(self, part: str) -> AbstractContextManager[None]:
        """If activations are kept, raise an error on all ranks when memory runs out inside on
        one."""
        if not self._keeps or len(global_ranks(self.group)) == 1:
            return contextlib.nullcontext()
        call = f"GradientCache, {part} of step {self._steps}"
        return out_of_memory_on_all_ranks(call, self.group)

    def _evaluate(self, encodings: list[Encoding], loss_kwargs: dict[str, Any]) -> Tensor:
        for encoding in encodings:
            encoding.forward(second_pass=False)
        args, kwargs = self._loss_arguments(encodings)
        return checked_loss(self.loss(*args, **kwargs, **loss_kwargs)).detach().reshape(())

    def _begin_backward(self, unused: UnusedLoss, call: str) -> None:
        all_gather_numbers(call, [], self.group)
        unused.used()

    def _loss_arguments(self, encodings: list[Encoding]) -> tuple[list[Any], dict[str, Any]]:
        if not self._settings.several:
            return encodings[0].form.arguments(encodings[0].cached)
        return [encoding.single_output() for encoding in encodings], {}

    def _encodings(self, batches: list[tuple[dict[str, Any], list[str]]]) -> list[Encoding]:
        settings = self._settings
        made = []
        for i, (encoder, (named, keywords)) in enumerate(
            zip(settings.encoders, batches, strict=True)
        ):
            name = f"encoder {i}" if settings.several else "the model"
            orders = Orders(name, named)
            named = in_encoders_order(named)
            feed = Feed(named, keywords, batch_size(named), settings.device)
            form = OutputForm(name, settings.outputs[i])
            made.append(Encoding(name, encoder, feed, form, settings.feature_dtype, orders))
        return made

    def _divide(self, encodings: list[Encoding], training: bool) -> None:
        """Set each encoding's micro-batches, with empty ones if other ranks have more."""
        for encoding, size in zip(encodings, self._settings.micro_batch_sizes, strict=True):
            encoding.micro_batches = encoding.orders.micro_batches(encoding.feed.rows, size)
        counts, kept = self._agreed([len(e.micro_batches) for e in encodings], training)
        self._keeps = any(kept)
        for encoding, count, most in zip(encodings, counts, kept, strict=True):
            idle = MicroBatch(slice(encoding.feed.rows, encoding.feed.rows))
            encoding.micro_batches += [idle] * (count - len(encoding.micro_batches))
            if not count:
                which = (
                    f"{' and '.join(encoding.feed.named)}: " if len(encodings) > 1 else "batches: "
                )
                raise ValueError(f"{which}expected at least one row over all processes, got 0")
            encoding.keep(most)

    def _agreed(self, counts: list[int], training: bool) -> tuple[list[int], list[int]]:
        """The maximum over ranks of each count of micro-batches, the minimum of those to be kept.

        A few steps compare weights along with them.
        """
        self._steps += training
        kept = [*self._settings.kept_counts(self.kept_micro_batches if training else 0)]
        ranks = global_ranks(self.group)
        if len(ranks) == 1:
            return counts, kept
        what = f"step {self._steps}" if training else "evaluation"
        call = f"GradientCache, {what} of {len(counts)} batches"
        weights = self._drift.numbers(self._parameters()) if training else []
        table = all_gather_numbers(call, [*counts, *kept, *weights], self.group)
        n = len(counts)
        if training:
            self._drift.compare([row[2 * n :] for row in table], ranks)
        columns = [*zip(*table, strict=True)]
        return [*map(max, columns[:n])], [*map(min, columns[n : 2 * n])]

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The encoders' parameters, with their names for messages."""
        for i, encoder in enumerate(self._settings.encoders):
            of = f" of encoder {i}" if self._settings.several else ""
            for name, parameter in parameters_in(encoder).items():
                yield f"{name}{of}", parameter


@functools.cache  # at the first step: it imports torch._dynamo
def _uncompiled_step() -> Callable[..., Tensor]:
    """`GradientCache._step` as a graph break. It is unbound, since a bound method would keep its
    instance, and so the encoders, alive until the garbage collector runs."""
    step: Callable[..., Tensor] = torch.compiler.disable(GradientCache._step)
    return step


def _distinct(encodings: list[Encoding]) -> bool:
    """Whether no wrapper gets two forward passes before the first one's backward pass."""
    wrappers = [wrapper for encoding in encodings for wrapper in encoding.wrappers]
    return len(set(wrappers)) == len(wrappers)
