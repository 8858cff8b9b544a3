"""Gradient caching (Gao et al. 2021, arXiv 2101.06983).

The gradient of a loss of b x d features with respect to the encoders' weights splits where the
graph is thin, at the features:

    features  = encode each micro-batch, without a graph     # O(b d) numbers are kept
    loss      = loss(features)                               # its own graph is kept, O(b d)
    loss.backward()                                          # gives d loss / d features, and then:
    encode each micro-batch again, with a graph, and send its rows of d loss / d features through

The second forward pass sees the random state of the first, so the two agree also under dropout.

The loss comes from one autograd node, whose inputs are the trainable parameters, and whose backward
pass is the last two lines. So a caller may do with the loss what one does with a loss: scale it,
add another, hand it to a trainer. All of it arrives at the node as one factor. The gradients of the
micro-batches are added up beside `.grad` and leave the node together, so that hooks on parameters,
those of a DistributedDataParallel around the whole training step too, see one gradient a step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megabatch.gradient_cache.arguments import Settings
from megabatch.gradient_cache.batches import batch_size
from megabatch.gradient_cache.drift import DriftCheck
from megabatch.gradient_cache.encoding import Encoding
from megabatch.gradient_cache.feed import Feed
from megabatch.gradient_cache.left_out import Unused
from megabatch.gradient_cache.node import attach
from megabatch.gradient_cache.outputs import OutputForm
from megabatch.gradient_cache.room import Room
from megabatch.gradient_cache.state import parameters_in
from megabatch.gradient_cache.waiting import WaitingStep, checked_loss
from megabatch.ranks import all_gather_numbers, global_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Encoder = Callable[..., Any]


class GradientCache:
    """A whole batch's loss and exact gradient, in the memory of one micro-batch's activations.

        step = GradientCache((image_encoder, text_encoder), loss, micro_batch_size=256)
        value = step(images, texts)      # first pass, and the loss
        value.backward()                 # second pass: .grad is filled
        optimizer.step()

    The value is a loss like any other: divide it for gradient accumulation, let a GradScaler scale
    it, add another cached loss, clip gradients afterwards, return it from a `training_step` or a
    `compute_loss`. Under `torch.no_grad()` a step only evaluates.

    In exact arithmetic the gradient is that of the undivided batch; with dropout, that of one graph
    through the same micro-batches under the same random states. The first pass goes encoder by
    encoder, micro-batch by micro-batch. The second sees what it saw: autocast, default dtype and
    device, precision of float32 products, train or eval, `no_sync`, random states; PyTorch's random
    state (CPU and CUDA) is afterwards as `backward()` found it. Python's and NumPy's generators are
    not replayed. Batch normalisation normalises each micro-batch by its own statistics, so it is
    **not exact**; its running statistics see each micro-batch once.

    **What an output is.** A tensor whose first dimension is the micro-batch's number of rows, in
    every micro-batch, is per sample: it is concatenated. A tensor of shape () or (1,) is shared by
    all samples (a scale, a bias): it must have the same value in every micro-batch, is taken once,
    and its gradient is sent back in one micro-batch, the last. Anything else is an error. Where all
    micro-batches have one row, shape (1,) counts as shared.

    **A batch of one micro-batch**, on every rank and of every encoder, is encoded once, as in a
    step without gradient caching: its graph waits for the loss.

    **Frozen encoders** run once: where no output requires a gradient there is no second pass. A
    module with trainable parameters is known to need one; for anything else (a locked tower, a
    method, a function) the first pass records a graph until an output requires a gradient. So does
    a locked tower inside one model, below trained modules: the largest modules without trainable
    parameters that give a vector a sample are not run in the second pass, unless something trained
    comes before them, their absence could be noticed (a hook inside, attributes that they set), or
    torch.compile has the model in one piece.

    **Gradients leave together**, when the second pass is done: an exception in it changes no
    `.grad`. (Where there is a gradient in `.grad` already, and no hook on the parameter, what comes
    is added there at once, to take no more memory.) Tensors that `loss` uses directly, those in
    `loss_kwargs` too, get their gradients in the same backward pass.

    **Several processes.** Under DistributedDataParallel and FSDP2 (`fully_shard`) each wrapped
    module synchronises its gradients once a step, in the last micro-batch of the encoder that it
    belongs to; its gradients go to `.grad` in each micro-batch, so `torch.autograd.grad` and
    `backward(inputs=...)` are errors there. A wrapper around the whole training step synchronises
    when the gradients leave the node. A rank with fewer micro-batches than another takes part in
    the rest with one row whose outputs are dropped; a rank without any row does so with two rows of
    ones. Wrappers, and batch normalisation, are found inside modules, methods of modules, partials,
    and among the modules that a function refers to; a wrapper hidden deeper still gives right
    gradients, but synchronises in each micro-batch. Encoders that nothing synchronises drift apart:
    a few weights are compared over the ranks at the beginning of the second and the tenth step, and
    a warning names one that differs. The ranks of a group tell each other what they do by way of
    their hosts; one that leaves `backward()` out is named by the others.

    `torch.compile` leaves a step out of its graphs; encoders and losses may be compiled. Compiled
    autograd is refused.
    """

    def __init__(
        self,
        encoders: Encoder | Sequence[Encoder],
        loss: Callable[..., Tensor],
        micro_batch_size: int | Sequence[int],
        *,
        group: ProcessGroup | Literal["local"] | None = None,
        device: torch.device | str | None = None,
        feature_dtype: torch.dtype | None = None,
        gradients_on_host: bool | None = None,
        input_names: Sequence[str] = (),
        outputs: int | str | Sequence[int | str] | None = None,
        **unknown: Any,
    ) -> None:
        """Check and keep the parts of a step.

        Args:
            encoders: a tuple of callables, one per batch, each giving a tensor; or one callable
                that takes all batches and gives a tensor, a tuple or a mapping of tensors. A tuple
                reaches the loss by position, a dict by keyword, another mapping (Hugging Face's
                ModelOutput) as one object of its class. A `None` keeps its position, but is left
                out of a dict. Every tensor returned, a logit scale too, is cached and its gradient
                sent back through the encoder, so none bypasses DDP or FSDP.
            loss: called as `loss(*outputs, **loss_kwargs)` or `loss(**outputs, **loss_kwargs)`, it
                gives one number. Parameters that it uses directly get their gradients directly.
            micro_batch_size: the rows that an encoder sees at once, at least 1; or as many numbers
                as there are encoders. The last micro-batch may be smaller; more than the batch has
                is legal.
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
            input_names: keywords of a call that are batches. One model gets them by keyword
                (`("input_ids", "pixel_values")`); of several encoders each has one. Other keywords
                go to the loss.
            outputs: of a model that returns more than the loss needs, the keys (or positions) of
                what is cached; the rest is dropped. For several encoders one, or one for each.

        Raises:
            TypeError: an argument of the wrong type; `scaler`, which is gone.
            ValueError: no encoder; micro_batch_size below 1; a feature_dtype that is no floating
                point; a number of names, sizes or outputs that does not fit the encoders.
        """
        self._settings = Settings.checked(
            encoders, loss, micro_batch_size, group, device, feature_dtype, input_names, outputs,
            unknown,
        )  # fmt: skip
        self.loss = loss
        self.group = group
        self.gradients_on_host = gradients_on_host
        self._room = Room()
        self._drift = DriftCheck()
        self._steps = 0
        self._last: Unused | None = None

    def __call__(self, /, *batches: Any, **keywords: Any) -> Tensor:
        """The loss of `batches`; its `backward()` adds their gradients to `.grad`.

        Args:
            *batches: tensors, or nested mappings, lists and tuples of tensors, all of one encoder
                with the same number of rows (first dimension). In the place of a tensor may stand
                an object with `__len__` and `__getitem__(slice) -> Tensor`, compressed images say:
                its rows are made when their turn comes, in each pass, and must be the same each
                time. Anything else (None, a string, a flag) goes to the encoder as it is, with each
                micro-batch. No row is legal where another rank has one. Batches stay as they are
                until `backward()` is done.
            **keywords: batches by keyword (`input_names`); the rest is passed on to the loss,
                whole.

        Returns:
            The loss, shape (). `backward()` is possible once; `retain_graph` and `create_graph` are
            not.

        Raises:
            TypeError: a batch, an encoder's output or the loss's is of the wrong type.
            ValueError: no row on any rank, or batches of different sizes; an output that is neither
                per sample nor shared; a loss that is not one number or needs no gradient;
                DistributedDataParallel with `static_graph=True`, which knows no `no_sync`; ranks
                that call different things.
            RuntimeError: an optimizer stepped, but the last step's loss was not backpropagated.
                Out of `backward()`: a second one, `retain_graph` or `create_graph`; a parameter or
                a batch changed in place meanwhile; `torch.autograd.grad` or `inputs=` with a
                wrapper inside the encoders. All these come before any `.grad` changes.
        """
        return _uncompiled_step()(self, batches, keywords)

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
        waiting = WaitingStep(
            encodings,
            once=once,
            room=self._room,
            gradients_on_host=self.gradients_on_host,
            tell=lambda: self._begin_backward(unused, call),
        )
        for encoding in encodings:
            if once:
                encoding.forward_once()
            else:
                encoding.forward(second_pass=True)
        # Autocast keeps its casts of weights, and one made without a graph passes no gradient on.
        torch.clear_autocast_cache()
        args, kwargs = self._loss_arguments(encodings)
        value = waiting.loss_of(self.loss, args, kwargs, loss_kwargs)
        del args, kwargs
        self._last = unused = Unused(waiting.inputs)
        return attach(value, waiting.inputs, waiting)

    def _evaluate(self, encodings: list[Encoding], loss_kwargs: dict[str, Any]) -> Tensor:
        for encoding in encodings:
            encoding.forward(second_pass=False)
        args, kwargs = self._loss_arguments(encodings)
        return checked_loss(self.loss(*args, **kwargs, **loss_kwargs)).detach().reshape(())

    def _begin_backward(self, unused: Unused, call: str) -> None:
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
            feed = Feed(named, keywords, batch_size(named), settings.device)
            form = OutputForm(name, settings.outputs[i])
            made.append(Encoding(name, encoder, feed, form, settings.feature_dtype))
        return made

    def _divide(self, encodings: list[Encoding], training: bool) -> None:
        """Give each encoding its micro-batches, and empty ones where other ranks have more."""
        for encoding, size in zip(encodings, self._settings.micro_batch_sizes, strict=True):
            rows = encoding.feed.rows
            starts = range(0, rows, size)
            encoding.micro_batches = [slice(start, min(start + size, rows)) for start in starts]
        most = self._most([len(encoding.micro_batches) for encoding in encodings], training)
        for encoding, count in zip(encodings, most, strict=True):
            rows = encoding.feed.rows
            encoding.micro_batches += [slice(rows, rows)] * (count - len(encoding.micro_batches))
            if not count:
                which = (
                    f"{' and '.join(encoding.feed.named)}: " if len(encodings) > 1 else "batches: "
                )
                raise ValueError(f"{which}expected at least one row over all processes, got 0")

    def _most(self, counts: list[int], training: bool) -> list[int]:
        """The largest of all ranks' numbers; in a few steps weights are compared on the way."""
        self._steps += training
        ranks = global_ranks(self.group)
        if len(ranks) == 1:
            return counts
        what = f"step {self._steps}" if training else "evaluation"
        call = f"GradientCache, {what} of {len(counts)} batches"
        weights = self._drift.numbers(self._parameters()) if training else []
        table = all_gather_numbers(call, [*counts, *weights], self.group)
        if training:
            self._drift.compare([row[len(counts) :] for row in table], ranks)
        return [max(column) for column in itertools.islice(zip(*table, strict=True), len(counts))]

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The encoders' parameters, with their names for messages."""
        for i, encoder in enumerate(self._settings.encoders):
            of = f" of encoder {i}" if self._settings.several else ""
            for name, parameter in parameters_in(encoder).items():
                yield f"{name}{of}", parameter


@functools.cache  # at the first step: it imports torch._dynamo
def _uncompiled_step() -> Callable[..., Tensor]:
    """`GradientCache._step` as a graph break; of the class, since a bound method would keep its
    instance, and so the encoders, alive until the garbage collector runs."""
    step: Callable[..., Tensor] = torch.compiler.disable(GradientCache._step)
    return step


def _distinct(encodings: list[Encoding]) -> bool:
    """Whether no wrapper would see a second forward pass before the backward pass of the first."""
    wrappers = [wrapper for encoding in encodings for wrapper in encoding.wrappers]
    return len(set(wrappers)) == len(wrappers)
