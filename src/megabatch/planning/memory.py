"""Memory besides the encoders' activations: weights, gradients, optimizer's state, and the loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megabatch.config.settings import TrainConfig
from megabatch.options import is_reference
from megabatch.similarity import settings
from megabatch.similarity.distributed.schedule import round_rows
from megabatch.similarity.triton.blocking import block_shape, padded

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
#: Bytes of optimizer state per element of a parameter.
_STATE = {"adamw": 8.0, "lamb": 8.0, "lars": 4.0, "lion": 4.0, "sgd": 4.0}
#: Bytes of a sum of products or of a logit: float32.
_WIDE = 4
#: Bytes for each row or column of a softmax: results, their gradients and states.
_STATISTICS = 52
#: Rows and columns of a block on the CPU, and bytes of its buffers for each of its logits. The rest
#: of the workspace saves logits.
_CPU_BLOCK = 512, 1024, 24
#: Losses of x, both views, against itself.
ITSELF = ("ntxent", "dcl")


class State(NamedTuple):
    """Bytes on each device that do not depend on the batch.

    With FSDP2 parameters, gradients and optimizer state are sharded, and unsharded parameters are
    there from the first forward pass of a step to its end (ZeRO-2).
    """

    weights: int
    gradients: int
    optimizer: int
    average: int
    whole_weights: int
    whole_gradients: int


def state_bytes(module: nn.Module, config: TrainConfig, ranks: int) -> State:
    """The state of a module that this many ranks train as configured."""
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    weights, gradients = (sum(p.nbytes for p in some) for some in (parameters, trained))
    optimizer = sum(_optimizer_bytes(config, parameter) for parameter in trained)
    average = 0 if config.ema_decay is None else sum(4 * p.numel() for p in trained)
    sharded = config.parallel == "fsdp" and ranks > 1
    n = ranks if sharded else 1
    return State(
        weights=-(-weights // n) + sum(buffer.nbytes for buffer in module.buffers()),
        gradients=-(-gradients // n),
        optimizer=-(-optimizer // n),
        average=-(-average // n),
        whole_weights=weights if sharded else 0,
        whole_gradients=gradients if sharded else 0,
    )


def _optimizer_bytes(config: TrainConfig, parameter: Tensor) -> int:
    if config.opt != "adafactor":
        momentum = config.opt not in ("lars", "sgd") or config.momentum > 0
        return int(_STATE[config.opt] * parameter.numel()) if momentum else 0
    first = 2 * parameter.numel() if config.beta1 else 0  # in bfloat16
    shape = sorted(parameter.shape)
    if len(shape) < 2 or shape[-2] < 32:  # not factored
        return first + 4 * parameter.numel()
    rest = parameter.numel() // (shape[-1] * shape[-2])
    return first + 4 * rest * (shape[-1] + shape[-2])


def loss_bytes(
    config: TrainConfig,
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    ranks: int,
    locked: frozenset[str] = frozenset(),
) -> int:
    """Peak memory of the loss in bytes, for `rows` pairs of this rank, besides the features (b, d).

    With hard negatives, besides theirs (b, k, d), too. It includes the features' gradients.
    `locked`: towers whose features need none. For a loss of the user's own it is these gradients
    alone: the rest is unknown. (Between hosts the library may form a grid of ranks, which is not
    counted: it takes at most 2 GiB more, and less for small shards.)
    """
    item, k = dtype.itemsize, config.hard_negatives
    trained = (2 + k - len(locked)) * rows  # rows of features with a gradient
    if is_reference(config.loss):
        return trained * width * item
    itself, siglip = config.loss in ITSELF, config.loss == "siglip"
    m = 2 * rows if itself else rows
    n = m * (1 + k)
    vectors = 0 if siglip else _STATISTICS * (m + n)
    joined = n if itself or k else 0  # rows of a copy: of both views, or of all texts

    def sweep(dim: int) -> int:
        stored = (m if itself else trained) * dim * item
        found = _sweep_bytes(config.loss, m, n, dim, item, device, ranks)
        found = stored + max(found, stored if siglip else 0)  # both passes' gradients
        return found + joined * dim * item + vectors

    if not config.matryoshka_dims:
        return sweep(width)
    # Prefixes are scaled to unit length in float32, and their gradients padded to the width.
    peak, before, wide = 0, 0, item + (_WIDE if item < _WIDE else 0)
    copies, padding = (m + n) * sum(config.matryoshka_dims) * wide, trained * width * item
    for dim in reversed(config.matryoshka_dims):
        peak = max(peak, before + copies + max(sweep(dim), trained * dim * wide + padding))
        before, copies = padding, copies - (m + n) * dim * wide
    return peak


def _sweep_bytes(loss: str, m: int, n: int, width: int, item: int, device: str, ranks: int) -> int:
    """Temporary bytes of the gradients of `m` rows and `n` columns of this rank, in blocks."""
    itself, siglip = loss in ITSELF, loss == "siglip"
    limit = settings.current().workspace or settings.DEFAULT_WORKSPACE[device]
    row, sums = width * item, width * _WIDE
    at_once = round_rows(n, ranks * row) if ranks > 1 else n
    gathered = ranks * at_once
    if device == "cpu":
        strip, cols, each = _CPU_BLOCK
        saved = 0 if siglip or ranks > 1 else _WIDE * m * n
        block = min(limit, each * min(strip, m) * min(cols, n) + saved)
    else:
        strip, cols = block_shape(m, gathered, width, item, itself, limit)
        block = item * min(strip, m) * min(cols, gathered)
        if (whole := padded(width, item)) != width:
            block += (m + (0 if itself else n)) * whole * item  # copies for the kernels
    if ranks == 1:  # sums of all columns, and of a strip of rows
        return block + sums * (n if itself else n + min(strip, m))
    # Of several rounds: features of this one, of the next, and of the previous one; gradients that
    # are computed, and those that are summed.
    features, sets = (1, 1) if at_once >= n else (3, 2)
    temporary = block + gathered * (features * row + sets * sums)
    if not itself and not siglip and at_once < n:
        # x's gradient is written when these are freed, but for the last round's sums. Of a single
        # round it is written before that, while y's sums come home.
        temporary = max(gathered * sums, temporary - m * row)
    return m * sums + temporary
