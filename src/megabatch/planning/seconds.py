"""The time of a step, by part, from the work that it does and the speeds of the GPUs.

A kernel takes the time of its operations and of its bytes, one after the other, and a constant. It
is a sum and not the larger of the two: products read and write memory before and after their loops,
and elementwise kernels have no operations that count.
"""

from __future__ import annotations

from megabatch.config.settings import TrainConfig
from megabatch.hints import is_reference
from megabatch.losses.registry import TRAINABLE
from megabatch.planning.machine import Machine, Speeds
from megabatch.planning.memory import ITSELF, sharing_ranks
from megabatch.planning.micro_batches import MicroBatches
from megabatch.planning.towers import Work
from megabatch.similarity.distributed.schedule import round_rows

#: A sweep of a loss takes `PER_OPERATION + PER_LOGIT / d` of the time of its operations in large
#: products: the exponentials and reductions of a tile do not depend on the width d. Fitted to
#: records of benchmarks/single_gpu.py and benchmarks/scaling.py.
PER_OPERATION, PER_LOGIT = 1.018, 85.0
#: Shares of the rate of large products that the encoders' products with attention, and convolutions
#: (by patches of images) reach. This and the next two come from benchmarks/plan_check.py.
PRODUCTS, CONVOLUTIONS = 0.97, 0.05
#: Seconds of each kernel in addition: its launch, and its tail, in which multiprocessors idle.
KERNEL = 5e-6
#: Share of the memory's rate that kernels reach which torch.compile does not fuse.
SEPARATE = 0.82
#: What remains of the bytes and of the kernels of operations between products when torch.compile
#: fuses them: by its own graphs 0.33 to 0.64 and 0.48 to 0.77, for ViTs and for glyphs.
FUSED = 0.46, 0.6


def step_seconds(
    config: TrainConfig,
    machine: Machine,
    micro: MicroBatches,
    kept: int,
    width: int,
    gradients: int,
    *,
    compiled: bool,
) -> dict[str, float] | None:
    """Seconds of a step on each GPU by part, one after another; None if they are not known.

    Reading, decoding and copying data, and the optimizer's step are not counted. Transfers between
    GPUs are, as far as nothing is computed meanwhile.

    Args:
        config, machine: of the run.
        micro: a process's micro-batches. kept: the number of those whose activations are kept.
        width: of the features. gradients: bytes of the weights' gradients.
        compiled: whether the towers are compiled.
    """
    speeds, one, count = machine.speeds, micro.mean, micro.count
    loss = loss_seconds(config, width, speeds, machine.count)
    if speeds is None or loss is None:
        return None
    once = 1 if count == 1 else kept
    encode, record, backward = (
        work_seconds(work, speeds, compiled=compiled)
        for work in (one.encode, one.record, one.backward)
    )
    # Gradients are averaged while the last micro-batch's backward pass runs.
    averaging = max(0.0, _averaging(machine, speeds, gradients) - backward)
    return {
        "first pass": (count - once) * encode + once * record,
        "second pass": (count - once) * record,
        "backward pass": count * backward,
        "loss": loss,
        "transfers": averaging + loss_transfers(config, width, machine, loss),
    }


def work_seconds(work: Work, speeds: Speeds, *, compiled: bool) -> float:
    """Seconds of an encoder's kernels on a GPU."""
    memory = speeds.memory * (1 if compiled else SEPARATE)
    share, kernels = FUSED if compiled else (1.0, 1.0)
    products = work.flops / PRODUCTS + work.convolved / CONVOLUTIONS
    nbytes = work.nbytes + share * work.other_bytes
    launches = work.kernels + kernels * work.other_kernels
    return products / speeds.products + nbytes / memory + launches * KERNEL


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


def loss_transfers(config: TrainConfig, width: int, machine: Machine, loss: float) -> float:
    """Seconds of the loss's transfers while nothing is computed, without latencies.

    Ranks form a grid as the library chooses it. A rank gathers the rows that it shares before it
    computes, and columns round by round, in both passes if there are several; the gradients of all
    of these are summed in float32. Transfers of a round are hidden by the computation of others.
    A test compares this with times of a simulation of every transfer.
    """
    speeds = machine.speeds
    if speeds is None or machine.count == 1:
        return 0.0
    rows = -(-config.global_batch_size // machine.count) * (1 + (config.loss in ITSELF))
    columns = rows * (1 + config.hard_negatives)
    features = 2 * (sum(config.matryoshka_dims) or width)
    each = machine.count // machine.hosts
    sharing = sharing_ranks(config.loss, machine.count, machine.hosts, rows, features)
    others = machine.count // sharing  # ranks whose columns are gathered
    at_once = round_rows(columns, others * features)
    local = min(sharing, each)  # ranks of a host that share rows; columns are shared by the others

    def seconds(rows: int, ranks: int, here: int, passes: int) -> float:
        received = (ranks - 1) * rows * (passes * features + 2 * features)
        outside = received * (ranks - here) / max(1, ranks - 1)
        within = received / speeds.nvlink if here > 1 else 0.0
        return max(within, outside / (here * speeds.network))

    passes = 1 if at_once >= columns else 2
    shared = seconds(rows, sharing, local, passes)
    gathered = seconds(columns, others, max(1, each // local), passes)
    return shared + max(gathered * at_once / columns, gathered - loss)


def _averaging(machine: Machine, speeds: Speeds, nbytes: int) -> float:
    """Seconds of the all-reduce of gradients: a reduce-scatter and an all-gather."""
    share = (machine.count - 1) / machine.count
    each = machine.count // machine.hosts
    rate = min(speeds.nvlink, each * speeds.network) if machine.hosts > 1 else speeds.nvlink
    return 2 * share * nbytes / rate
