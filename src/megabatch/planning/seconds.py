"""The time of a step, by part, from the work that it does and the figures of the GPU.

A kernel takes the time of its operations and of its bytes, one after the other, and a constant. It
is a sum and not the larger of the two: products read and write memory before and after their loops,
and elementwise kernels have no operations that count.
"""

from __future__ import annotations

from dataclasses import dataclass

from megabatch.config.settings import TrainConfig
from megabatch.planning.loss import loss_seconds
from megabatch.planning.micro_batches import MicroBatches, total
from megabatch.planning.simulation.hardware import Cluster, Encoding, Gpu
from megabatch.planning.simulation.schedules import SWEEPS, Workload, default, not_simulated
from megabatch.planning.simulation.step import simulate
from megabatch.planning.state import State
from megabatch.planning.work import Work

#: Bytes that a step of an optimizer reads and writes for each byte of weights, gradients and state,
#: with the norm of the gradients before it.
_UPDATE = 2


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step on each GPU; the parts follow one another.

    Attributes:
        first_pass: forward passes of all micro-batches, with a graph for those that are kept.
        second_pass: forward passes of the others, with a graph.
        backward_pass: of all.
        loss: forward and backward pass.
        transfers: between GPUs, as far as nothing is computed meanwhile.
        optimizer: its step.
        inputs: of copies from the host, as far as nothing is computed meanwhile.
    """

    first_pass: float
    second_pass: float
    backward_pass: float
    loss: float
    transfers: float
    optimizer: float
    inputs: float

    @property
    def encoders(self) -> float:
        """Seconds of the passes through the encoders."""
        return self.first_pass + self.second_pass + self.backward_pass

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())


def step_seconds(
    config: TrainConfig,
    micro: MicroBatches,
    kept: int,
    *,
    width: int,
    state: State,
    cluster: Cluster,
    encoding: Encoding,
    pair_bytes: int,
    compiled: bool,
) -> StepSeconds | None:
    """The time of a step; None if the loss's is not known.

    Reading and decoding data are not counted, nor transfers of a loss that is not simulated.

    Args:
        config: of the run.
        micro: a process's micro-batches. kept: the number of those whose activations are kept.
        width: of the features.
        state: weights, gradients and the optimizer's state of a GPU.
        cluster: the GPUs. encoding: how the encoders use them.
        pair_bytes: of a pair's inputs.
        compiled: whether the towers are compiled.
    """
    gpu = cluster.gpu
    loss_and_transfers = _loss_and_transfers(config, width, cluster)
    if loss_and_transfers is None:
        return None
    loss, exposed = loss_and_transfers
    count = micro.count
    once = 1 if micro.once else kept
    again, waiting = micro.split(once)

    def seconds(work: Work) -> float:
        return work_seconds(work, gpu, encoding, compiled=compiled)

    first = seconds(total(again, "encode") + total(waiting, "record"))
    second = seconds(total(again, "record"))
    backward = seconds(total(micro.runs, "backward"))
    if cluster.gpus > 1:
        # All-reduced while the last micro-batch's backward pass runs.
        last = micro.runs[-1][0].backward
        exposed += max(0.0, _averaging(cluster, state.gradients) - seconds(last))
    passes = 2 - once / count
    copies = passes * count * micro.size * pair_bytes / encoding.host_link
    first_copy = micro.size * pair_bytes / encoding.host_link
    computing = first + second + backward
    updated = _UPDATE * (state.weights + state.gradients + state.optimizer + state.average)
    return StepSeconds(
        first_pass=first,
        second_pass=second,
        backward_pass=backward,
        loss=loss,
        transfers=exposed,
        optimizer=updated / gpu.memory_rate,
        inputs=first_copy + max(0.0, copies - computing),
    )


def _loss_and_transfers(
    config: TrainConfig, width: int, cluster: Cluster
) -> tuple[float, float] | None:
    """Seconds of the loss's computation, and of transfers while nothing is computed.

    None if the loss's time is not known.
    """
    ranks = cluster.gpus
    loss = loss_seconds(config, width, cluster.gpu, ranks)
    if loss is None:
        return None
    if ranks == 1 or not_simulated(config.loss, config.hard_negatives):
        return loss, 0.0
    rows = -(-config.global_batch_size // ranks)
    item = 4 if config.precision == "fp32" else 2
    widths = sum(config.matryoshka_dims) or width
    work = Workload(rows, widths, SWEEPS[config.loss], item)
    simulated = simulate(cluster, work, default(cluster, work))
    exposed = min(simulated.exposed, simulated.seconds)
    return simulated.seconds - exposed, exposed


def work_seconds(work: Work, gpu: Gpu, encoding: Encoding, *, compiled: bool) -> float:
    """Seconds of an encoder's kernels on a GPU."""
    memory = gpu.memory_rate * (1 if compiled else encoding.separate)
    products = work.flops / encoding.products + work.convolved / encoding.convolutions
    return products / gpu.product_rate + work.nbytes / memory + work.kernels * encoding.kernel


def _averaging(cluster: Cluster, nbytes: int) -> float:
    """Seconds of the all-reduce of gradients: a reduce-scatter and an all-gather."""
    share = (cluster.gpus - 1) / cluster.gpus
    rate = (
        cluster.nvlink
        if cluster.nodes == 1
        else min(cluster.nvlink, cluster.local * cluster.nic_share)
    )
    return 2 * share * nbytes / rate
