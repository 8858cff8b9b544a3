"""Gradient caching (Gao et al. 2021, arXiv 2101.06983).

The chain rule splits the gradient of a loss of b x d features with respect to the encoders' weights
at the features, where the graph is thin:

    features  = encode each micro-batch, without a graph     # O(b d) numbers are cached
    loss      = loss(features)                               # its own graph is kept, O(b d)
    loss.backward()                                          # gives d loss / d features, and then:
    encode each micro-batch again, with a graph, and backpropagate its rows of d loss / d features

The loss is the output of one autograd node, whose inputs are the trainable parameters, and whose
backward pass consists of the last two lines. So a caller may use it like any loss. The gradients of
micro-batches are summed outside of `.grad` and leave the node together: hooks on parameters, also
those of a DistributedDataParallel around the whole training step, see one gradient per step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.by_length import Key, tokens_by_length
from megabatch.gradient_cache.encoding import Encoding
from megabatch.gradient_cache.feed import Feed
from megabatch.gradient_cache.outputs import CachedOutputs
from megabatch.gradient_cache.second_pass import PendingLoss, Step, loss_of
from megabatch.gradient_cache.state import PassesCheck
from megabatch.gradient_cache.wrappers import WEIGHTS_COMPARED, weights_differ
from megabatch.ranks import all_gather_numbers, global_ranks

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

    The value is a loss like any other: divide or scale it, add another loss, or return it to a
    trainer. Under `torch.no_grad()` a step only computes the loss. In exact arithmetic the gradient
    is that of the undivided batch; with dropout, that of one graph through the same micro-batches
    with the same random numbers. Batch normalisation uses each micro-batch's own statistics, so it
    is **not exact**. DistributedDataParallel and `fully_shard` belong inside the encoders or around
    the whole training step: gradients are reduced once per step. The documentation's page on
    gradient caching has the whole contract.
    """

    def __init__(
        self,
        encoders: Encoder | Sequence[Encoder],
        loss: Callable[..., Tensor],
        micro_batch_size: int | Sequence[int] | None = None,
        *,
        micro_batch_tokens: int | Sequence[int] | None = None,
        group: ProcessGroup | DeviceMesh | Literal["local"] | None = None,
        device: torch.device | str | None = None,
        feature_dtype: torch.dtype | None = None,
        gradients_on_host: bool | None = None,
        input_names: Sequence[str] = (),
        outputs: int | str | Sequence[int | str] | None = None,
        kept_micro_batches: int | Sequence[int] = 0,
    ) -> None:
        """Check the arguments.

        Args:
            encoders: a tuple of callables, one per batch, each returning a tensor, or a tuple that
                reaches the loss as one argument (such as tokens and mask); or one callable that
                takes all batches and returns a tensor, a tuple or a mapping of tensors. A
                tuple reaches the loss by position, a dict by keyword, another mapping (Hugging
                Face's ModelOutput) as one object of its class. A `None` keeps its position, but is
                left out of a dict. A tensor has a row per sample, or shape () or (1,) and one value
                in all micro-batches (a scale, a bias).
            loss: called as `loss(*outputs, **loss_kwargs)` or `loss(**outputs, **loss_kwargs)`;
                returns one number. Parameters that it uses directly get their gradients directly.
            micro_batch_size: rows per call of an encoder, at least 1; or one number per encoder.
                For a `SortedByLength`, whose micro-batches have equal numbers of tokens, the mean.
            micro_batch_tokens: instead, the most tokens per call of an encoder, padding included
                (rows times columns), or one number per encoder. A longer text is encoded alone. An
                encoder's only batch becomes a `SortedByLength` if it is token ids: a tokenizer's
                mapping, with lengths from its `attention_mask`; or integers (rows, columns), all
                equally long. For batches without tokens `micro_batch_size` is needed too.
            group: the ranks that must agree on the number of micro-batches: a process group, a
                DeviceMesh, `None` for the default group if torch.distributed is initialised, or
                "local" for no communication.
            device: the encoders' device, to which each micro-batch is moved ahead of its turn, if
                it is not None.
            feature_dtype: dtype of cached per-sample outputs with at least two dimensions.
            gradients_on_host: whether gradients of features wait on the host for the second pass.
                None: those of 64 MiB or more on a GPU.
            input_names: keywords of a call that are batches. A single model gets them by keyword
                (`("input_ids", "pixel_values")`); several encoders get one each. Other keywords
                are passed to the loss.
            outputs: for models that return more than the loss needs, the keys (or positions) of
                the outputs to be cached. For several encoders, one key for all or one for each.
            kept_micro_batches: how many micro-batches of each encoder, at most, are encoded once,
                with their activations kept for the backward pass; or one number per encoder. All
                ranks use the smallest number. An attribute of this name may be set between steps.

        Raises:
            TypeError, ValueError: an argument is of a wrong type or out of range.
        """
        given: Any = encoders
        several = isinstance(given, (tuple, list, nn.ModuleList))
        self._encoders: tuple[Encoder, ...] = tuple(given) if several else (given,)
        self._count = len(self._encoders) if several else None
        _check_options(self._encoders, loss, group, feature_dtype)
        self._sizes = _sizes(self._count, micro_batch_size, micro_batch_tokens)
        self._input_names = _checked_input_names(input_names, self._count)
        self._outputs = _checked_outputs(outputs, self._count)
        self._device = None if device is None else torch.device(device)
        self._feature_dtype = feature_dtype
        self.kept_micro_batches = kept_micro_batches
        self._kept_counts()  # checks it
        self.loss = loss
        self.group = group
        self.gradients_on_host = gradients_on_host
        self._passes = PassesCheck()
        self._weights_differ = False
        self._steps = 0
        self._pending: PendingLoss | None = None

    def __call__(self, /, *batches: Any, **keywords: Any) -> Tensor:
        """Compute the loss of `batches`; its `backward()` adds their gradients to `.grad`.

        Args:
            *batches: tensors, or nested mappings, lists and tuples of tensors, with the same number
                of rows (first dimension) for each encoder; none if another rank has some. Instead
                of a tensor there may be an object with `__len__` and `__getitem__(slice)`, such as
                compressed images, which makes the same tensor of rows in each pass. A list or tuple
                of other values with one item per row, such as captions, is split along with the
                tensors; anything else is passed unchanged. A mapping is one argument of the
                encoder. Batches must not change until `backward()` is done.
            **keywords: batches by keyword (`input_names`); the others are passed to the loss, not
                split.

        Returns:
            The loss, shape (). It supports one `backward()`, without `retain_graph` or
            `create_graph`.

        Raises:
            TypeError: a batch, an encoder's output or the loss has a wrong type; an encoder cannot
                take a mapping as one argument, but takes keywords.
            ValueError: no rank has a row, or batches differ in size; an output is neither per
                sample nor shared; the loss is not one number or needs no gradient; ranks make
                different calls; DistributedDataParallel cannot hold back its reduction.
            RuntimeError: a forward pass changed a parameter or a batch in place. From `backward()`:
                the second pass is not possible, see the documentation's page on gradient caching.
        """
        return _uncompiled_step()(self, batches, keywords)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": None}

    def _step(self, batches: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        training = torch.is_grad_enabled()
        if self._pending is not None:
            self._pending.end()
        self._steps += training
        loss_kwargs = {k: v for k, v in keywords.items() if k not in self._input_names}
        encodings = self._encodings(batches, keywords)
        self._divide(encodings, training)
        if not training:
            for encoding in encodings:
                encoding.forward()
            return loss_of(encodings, self.loss, loss_kwargs).detach()
        on_host = self.gradients_on_host
        step = Step(encodings, self._steps, self.group, on_host)
        value = step.first_pass(self.loss, loss_kwargs)
        self._pending = step.pending
        return value

    def _encodings(self, batches: Sequence[Any], keywords: Mapping[str, Any]) -> list[Encoding]:
        """The encoders with their batches, which are not divided yet."""
        by_name = {name: keywords[name] for name in self._input_names if name in keywords}
        check = self._passes if self._passes.wanted(self._steps) else None
        found = []
        several = self._count is not None
        for i, named in enumerate(_named_batches(batches, by_name, self._count)):
            name = f"encoder {i}" if several else "the model"
            if self._sizes[i][1] is not None and len(named) == 1:
                named = {key: tokens_by_length(key, batch) for key, batch in named.items()}
            feed = Feed(name, named, () if several else by_name, self._device)
            outputs = CachedOutputs(feed, self._outputs[i], self._feature_dtype, single=several)
            found.append(Encoding(self._encoders[i], feed, outputs, check))
        return found

    def _divide(self, encodings: list[Encoding], training: bool) -> None:
        """Set each encoding's micro-batches.

        Ranks agree on the largest number of micro-batches, and the smallest of those to be kept.
        """
        for encoding, sizes in zip(encodings, self._sizes, strict=True):
            encoding.micro_batches = encoding.feed.divided(*sizes)
        counts = [len(encoding.micro_batches) for encoding in encodings]
        kept = [*self._kept_counts()] if training else [0] * len(counts)
        if len(global_ranks(self.group)) > 1:
            what = f"step {self._steps}" if training else "evaluation"
            call = f"GradientCache, {what} of {len(counts)} batches"
            columns = [*zip(*all_gather_numbers(call, [*counts, *kept], self.group), strict=True)]
            if training and self._steps in WEIGHTS_COMPARED and not self._weights_differ:
                parameters = (p for encoding in encodings for p in encoding.parameters.values())
                self._weights_differ = weights_differ(self._steps, parameters, self.group)
            counts, kept = [*map(max, columns[: len(counts)])], [*map(min, columns[len(counts) :])]
        wrappers = [wrapper for encoding in encodings for wrapper in encoding.wrappers]
        # A wrapper takes no second forward pass before the backward pass of the first.
        only = training and set(counts) == {1} and len(set(wrappers)) == len(wrappers)
        for encoding, count, most in zip(encodings, counts, kept, strict=True):
            if not count:
                raise ValueError(
                    f"batches: expected at least one row of {encoding.name} over all processes, "
                    "got 0"
                )
            encoding.divide(count, most, only=only)

    def _kept_counts(self) -> tuple[int, ...]:
        """For each encoder, the number of micro-batches whose graphs may be kept."""
        return _integers("kept_micro_batches", self.kept_micro_batches, self._count, least=0)


@functools.cache  # at the first step: it imports torch._dynamo
def _uncompiled_step() -> Callable[..., Tensor]:
    """`GradientCache._step` as a graph break. It is unbound, since a bound method would keep its
    instance, and so the encoders, alive until the garbage collector runs."""
    step: Callable[..., Tensor] = torch.compiler.disable(GradientCache._step)
    return step


def _check_options(encoders: Sequence[Any], loss: Any, group: Any, feature_dtype: Any) -> None:
    """Check the types of these arguments."""
    if not encoders:
        raise ValueError("encoders: expected at least one, got none")
    for name, function in (*(("encoders", encoder) for encoder in encoders), ("loss", loss)):
        if not callable(function):
            raise TypeError(f"{name}: expected a callable, got {type(function).__name__}")
    global_ranks(group)  # raises an error for anything else than a group
    if feature_dtype is not None and not getattr(feature_dtype, "is_floating_point", False):
        raise TypeError(
            f"feature_dtype: expected a floating point torch.dtype or None, got {feature_dtype!r}"
        )


# The functions below take the number of encoders, None for a single model that takes all batches.


def _per_encoder(name: str, values: Sequence[Any], count: int | None) -> tuple[Any, ...]:
    """One value for each encoder, of which a single one is for all."""
    if len(values) not in (1, count or 1):
        raise ValueError(f"{name}: expected one, or one per encoder, {count}, got {len(values)}")
    return tuple(values) if len(values) > 1 else (*values,) * (count or 1)


def _integers(name: str, value: Any, count: int | None, least: int) -> tuple[int, ...]:
    """One number for each encoder."""
    several = count is not None and isinstance(value, (tuple, list))
    numbers = _per_encoder(name, value if several else (value,), count)
    for number in numbers:
        if not isinstance(number, int):
            raise TypeError(f"{name}: expected an int, got {type(number).__name__}")
        if number < least:
            raise ValueError(f"{name}: expected at least {least}, got {number}")
    return numbers


def _sizes(count: int | None, rows: Any, tokens: Any) -> list[tuple[int | None, int | None]]:
    """For each encoder, the rows and the tokens of a micro-batch, one of which may be None."""
    if rows is None and tokens is None:
        raise TypeError("micro_batch_size: expected an int, or micro_batch_tokens, got neither")
    given = {"micro_batch_size": rows, "micro_batch_tokens": tokens}
    columns = [
        [None] * (count or 1) if value is None else _integers(name, value, count, least=1)
        for name, value in given.items()
    ]
    return [*zip(*columns, strict=True)]


def _checked_input_names(value: Any, count: int | None) -> tuple[str, ...]:
    """The keywords of a call that are batches."""
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"input_names: expected a sequence of strings, got {value!r}")
    if value and len(value) != (count or len(value)):
        raise ValueError(f"input_names: expected one per encoder, {count}, got {', '.join(value)}")
    return tuple(value)


def _checked_outputs(value: Any, count: int | None) -> tuple[tuple[Key, ...] | None, ...]:
    """For each encoder, the keys of the outputs to be cached; None for all."""
    if value is None:
        return (None,) * (count or 1)
    keys = (value,) if isinstance(value, (int, str)) else tuple(value)
    if not keys:
        raise ValueError("outputs: expected keys or positions, got none")
    return (keys,) if count is None else tuple((k,) for k in _per_encoder("outputs", keys, count))


def _named_batches(
    batches: Sequence[Any], by_name: Mapping[str, Any], count: int | None
) -> list[dict[str, Any]]:
    """For each encoder, its batches by name."""
    given = {f"batch {i}": batch for i, batch in enumerate(batches)} | {**by_name}
    if not given:
        raise TypeError("batches: expected at least one, got none")
    if count is None:
        return [given]
    if batches and by_name:
        raise TypeError(
            f"batches: expected all by position or all by keyword, got {len(batches)} by position "
            f"and {', '.join(by_name)} by keyword"
        )
    if len(given) != count:
        raise TypeError(f"batches: expected one per encoder, {count}, got {len(given)}")
    return [{name: batch} for name, batch in given.items()]
