"""The time of a step, by part, from the work that it does and the speeds of the GPUs.

A kernel takes the time of its operations and of its bytes, one after the other, and a constant. It
is a sum and not the larger of the two: products read and write memory before and after their loops,
and elementwise kernels have no operations that count.
"""

from __future__ import annotations

from megabatch.config.settings import TrainConfig
from megabatch.losses.registry import TRAINABLE
from megabatch.options import is_reference
from megabatch.planning.machine import Machine, Speeds
from megabatch.planning.memory import ITSELF
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
    GPUs are, as far as nothing is computed meanwhile. `kept`: micro-batches that are encoded once;
    `width`: of the features; `gradients`: bytes of the weights' gradients.
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
    averaging = max(0.0, _averaging(machine, gradients) - backward)
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

    A rank gathers the columns of all others round by round, in both passes if there are several
    rounds, and their gradients are summed in float32. Transfers of a round are hidden by the
    computation of others. (Between hosts the library may form a grid of ranks, which moves less.)
    """
    if machine.count == 1:
        return 0.0
    columns = -(-config.global_batch_size // machine.count) * (1 + config.hard_negatives)
    columns *= 1 + (config.loss in ITSELF)
    features = 2 * (sum(config.matryoshka_dims) or width)
    at_once = round_rows(columns, machine.count * features)
    passes = 1 if at_once >= columns else 2
    received = (machine.count - 1) * columns * (passes * features + 2 * features)
    seconds = received / _link(machine)
    return max(seconds * at_once / columns, seconds - loss)


def _averaging(machine: Machine, nbytes: int) -> float:
    """Seconds of the all-reduce of gradients: a reduce-scatter and an all-gather."""
    return 2 * (machine.count - 1) / machine.count * nbytes / _link(machine)


def _link(machine: Machine) -> float:
    """Bytes per second that a GPU receives in a collective: a host's GPUs share what comes in."""
    speeds = machine.speeds or Speeds()
    several = machine.count > machine.per_host
    return min(speeds.nvlink, machine.per_host * speeds.network) if several else speeds.nvlink
