"""The time of a step, by part, from the work that it does and the speeds of the GPUs.

A kernel takes the time of its operations and of its bytes, one after the other, and a constant. It
is a sum and not the larger of the two: products read and write memory before and after their loops,
and elementwise kernels have no operations that count.
"""

from __future__ import annotations

from megabatch.config.settings import TrainConfig
from megabatch.hints import is_reference
from megabatch.losses.registry import TRAINABLE
from megabatch.planning.counter import Work
from megabatch.planning.machine import Machine
from megabatch.planning.memory import State
from megabatch.planning.micro_batches import MicroBatches
from megabatch.planning.speeds import Speeds
from megabatch.similarity.distributed.schedule import columns_for, most_sharing, round_rows

#: A sweep of a loss takes `PER_OPERATION + PER_LOGIT / d` of the time of its operations in large
#: products: the exponentials and reductions of a tile do not depend on the width d.
PER_OPERATION, PER_LOGIT = 1.018, 85.0
#: Bytes that a step of an optimizer reads and writes for each byte of weights, gradients and state,
#: with the norm of the gradients before it.
_UPDATE = 2
#: What remains of the bytes and of the kernels of operations between products when torch.compile
#: fuses them: by its own graphs 0.33 to 0.64 and 0.48 to 0.77, for ViTs and for glyphs.
FUSED = 0.46, 0.6
#: Losses whose transfers between GPUs are counted. Others have x against itself.
TRANSFERRED = ("clip", "siglip", "infonce")


def step_seconds(
    config: TrainConfig,
    machine: Machine,
    speeds: Speeds,
    micro: MicroBatches,
    kept: int,
    *,
    width: int,
    state: State,
    pair_bytes: int,
    compiled: bool,
) -> dict[str, float] | None:
    """Seconds of a step on each GPU by part, one after another; None if the loss's are not known.

    Reading and decoding data are not counted. Transfers between GPUs, and copies of inputs from the
    host, are counted as far as nothing is computed meanwhile.

    Args:
        config, machine, speeds: of the run.
        micro: a process's micro-batches. kept: the number of those whose activations are kept.
        width: of the features.
        state: weights, gradients and the optimizer's state of a GPU.
        pair_bytes: of a pair's inputs.
        compiled: whether the towers are compiled.
    """
    loss = loss_seconds(config, width, speeds, machine.count)
    if loss is None:
        return None
    once = 1 if micro.count == 1 else kept
    again, waiting = micro.split(once)

    def seconds(work: Work) -> float:
        return work_seconds(work, speeds, compiled=compiled)

    first = seconds(again.total("encode").plus(waiting.total("record")))
    second, backward = seconds(again.total("record")), seconds(micro.total("backward"))
    # Gradients are averaged while the last micro-batch's backward pass runs.
    averaging = _averaging(machine, speeds, state.gradients) - seconds(micro.runs[-1][0].backward)
    copy = micro.size * pair_bytes / speeds.host_link
    copies = (2 * micro.count - once) * copy
    updated = _UPDATE * (state.weights + state.gradients + state.optimizer + state.average)
    return {
        "first_pass": first,
        "second_pass": second,
        "backward_pass": backward,
        "loss": loss,
        "transfers": max(0.0, averaging) + loss_transfers(config, width, machine, speeds, loss),
        "optimizer": updated / speeds.memory,
        "inputs": copy + max(0.0, copies - first - second - backward),
    }


def work_seconds(work: Work, speeds: Speeds, *, compiled: bool) -> float:
    """Seconds of an encoder's kernels on a GPU."""
    memory = speeds.memory * (1 if compiled else speeds.separate)
    share, kernels = FUSED if compiled else (1.0, 1.0)
    products = work.flops / speeds.encoders + work.convolved / speeds.convolutions
    nbytes = work.nbytes + share * work.other_bytes
    launches = work.kernels + kernels * work.other_kernels
    return products / speeds.products + nbytes / memory + launches * speeds.kernel


def loss_seconds(
    config: TrainConfig, width: int, speeds: Speeds | None, ranks: int
) -> float | None:
    """Seconds per step for the loss on such GPUs; None if they or the loss's work are not known.

    Transfers are not counted.
    """
    if speeds is None or config.precision == "fp32" or is_reference(config.loss):
        return None
    widths = sum(config.matryoshka_dims) or width
    logits = config.global_batch_size**2 * (1 + config.hard_negatives)
    operations = TRAINABLE[config.loss].work * logits * widths
    return operations / ranks / speeds.products * (PER_OPERATION + PER_LOGIT / widths)


def loss_transfers(
    config: TrainConfig, width: int, machine: Machine, speeds: Speeds, loss: float
) -> float:
    """Seconds of the loss's transfers while nothing is computed, without latencies.

    Ranks form a grid as the library chooses it. A rank gathers the rows that it shares before it
    computes, and columns round by round, in both passes if there are several; the gradients of all
    of these are summed in float32. Transfers of a round are hidden by the computation of others.
    A test compares this with times of a simulation of every transfer. Transfers of
    losses of x against itself, or with hard negatives, are not counted: 0.
    """
    if machine.count == 1 or not counts_transfers(config):
        return 0.0
    rows = -(-config.global_batch_size // machine.count)
    features = 2 * (sum(config.matryoshka_dims) or width)
    each, rest = divmod(machine.count, machine.hosts)
    most = most_sharing(rows, features)
    columns = max(1, 0 if rest else columns_for(machine.hosts, each, most))
    sharing = machine.count // columns
    at_once = round_rows(rows, sharing * features)
    local = min(columns, each)  # ranks of a host that share rows; columns are shared by the others

    def seconds(ranks: int, here: int, passes: int) -> float:
        received = (ranks - 1) * rows * (passes * features + 2 * features)
        outside = received * (ranks - here) / max(1, ranks - 1)
        within = received / speeds.nvlink if here > 1 else 0.0
        return max(within, outside / (here * speeds.network))

    passes = 1 if at_once >= rows else 2
    shared = seconds(columns, local, passes)
    gathered = seconds(sharing, max(1, each // local), passes)
    return shared + max(gathered * at_once / rows, gathered - loss)


def counts_transfers(config: TrainConfig) -> bool:
    """Whether the transfers of the configuration's loss are counted."""
    return config.loss in TRANSFERRED and not config.hard_negatives


def _averaging(machine: Machine, speeds: Speeds, nbytes: int) -> float:
    """Seconds of the all-reduce of gradients: a reduce-scatter and an all-gather."""
    share = (machine.count - 1) / machine.count
    each = machine.count // machine.hosts
    rate = min(speeds.nvlink, each * speeds.network) if machine.hosts > 1 else speeds.nvlink
    return 2 * share * nbytes / rate
