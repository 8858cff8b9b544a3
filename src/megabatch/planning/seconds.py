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
#: records of benchmarks/single_gpu.py and benchmarks/scaling.py. Kernels for Hopper GPUs, which
#: most losses have, hide more of it; on other GPUs they take some 7% longer than is said here.
PER_OPERATION, PER_LOGIT, PER_LOGIT_ON_HOPPER = 1.018, 85.0, 30.0
#: The losses without kernels for Hopper GPUs.
NOT_ON_HOPPER = ("siglip", *ITSELF)
#: Shares of the rate of large products that the encoders' products with attention, and convolutions
#: (by patches of images) reach: products alone 1.04 (benchmarks/results/step-time.json), as between
#: other kernels the GPU's clock is higher, and more here, as their bytes count in addition. This
#: and the next two come from benchmarks/plan_check.py.
PRODUCTS, CONVOLUTIONS = 1.09, 0.05
#: Seconds of each kernel in addition: its launch, and its tail, in which multiprocessors idle.
KERNEL = 5e-6
#: Share of the memory's rate that kernels reach which torch.compile does not fuse.
SEPARATE = 0.82
#: What remains of the bytes and of the kernels of operations between products when torch.compile
#: fuses them: by its own graphs 0.33 to 0.64 and 0.48 to 0.77, for ViTs and for glyphs.
FUSED = 0.46, 0.6


def step_seconds(
    config: TrainConfig, machine: Machine, micro: MicroBatches, kept: int, width: int
) -> dict[str, float] | None:
    """Seconds of a step on each GPU by part, one after another; None if they are not known.

    Not counted are reading, decoding and copying data, the optimizer's step, and the averaging of
    gradients, which the last backward pass hides. `kept`: micro-batches that are encoded once;
    `width`: of the features.
    """
    speeds, one, count = machine.speeds, micro.mean, micro.count
    loss = loss_seconds(config, width, speeds, machine.count)
    if speeds is None or loss is None:
        return None
    once = 1 if count == 1 else kept
    encode, record, backward = (
        work_seconds(work, speeds, compiled=bool(config.torchcompile))
        for work in (one.encode, one.record, one.backward)
    )
    return {
        "first pass": (count - once) * encode + once * record,
        "second pass": (count - once) * record,
        "backward pass": count * backward,
        "loss": loss,
        "transfers": loss_transfers(config, width, speeds, machine.count),
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
    """Seconds per step for the loss on such GPUs; None if they or the loss's work are not known."""
    if speeds is None or config.precision == "fp32" or is_reference(config.loss):
        return None
    widths = sum(config.matryoshka_dims) or width
    logits = config.global_batch_size**2 * (1 + config.hard_negatives)
    operations = TRAINABLE[config.loss].work * logits * widths
    per_logit = PER_LOGIT if config.loss in NOT_ON_HOPPER else PER_LOGIT_ON_HOPPER
    return operations / ranks / speeds.products * (PER_OPERATION + per_logit / widths)


def loss_transfers(config: TrainConfig, width: int, speeds: Speeds, ranks: int) -> float:
    """Seconds of the loss's transfers that no computation hides: one round.

    A rank receives the features of the others, and later sums of gradients in float32. From other
    hosts they come as fast, with a card of 400 Gbit/s for each of 8 GPUs, which share what comes.
    """
    columns = -(-config.global_batch_size // ranks) * (1 + config.hard_negatives)
    features = 2 * (sum(config.matryoshka_dims) or width) * (1 + (config.loss in ITSELF))
    received = 3 * features * (ranks - 1) * round_rows(columns, ranks * features)
    return received / speeds.nvlink
