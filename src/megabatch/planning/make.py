"""Makes a plan: with the size of micro-batches if it is "auto", and with suggestions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megabatch.config.settings import TrainConfig, unmeasured_micro_batch
from megabatch.errors import plural
from megabatch.gradient_cache.state import BATCH_NORMS
from megabatch.models import Towers
from megabatch.planning.lengths import TextLengths
from megabatch.planning.machine import Machine
from megabatch.planning.plan import PHASES, Plan, Planner
from megabatch.planning.simulation.hardware import (
    Cluster,
    Encoding,
    encoding_named,
    usual_cluster,
)


def make_plan(
    config: TrainConfig,
    towers: Towers,
    machine: Machine,
    *,
    file_bytes: float | None = None,
    text_tokens: int | None = None,
    lengths: TextLengths | None = None,
    cluster: Cluster | None = None,
    encoding: Encoding | None = None,
) -> Plan:
    """Estimate a run's memory and time, whether it fits, and if not, settings that would.

    Nothing is computed or allocated, whatever the sizes; it takes some seconds.

    Args:
        config: the run's settings.
        towers: its model.
        machine: its devices.
        file_bytes: mean size of an image file if images are decoded late; else None.
        text_tokens: tokens of each micro-batch's longest text, if texts are trimmed.
        lengths: of a sample of texts instead, if they are trimmed. Without either of the two, texts
            have all tokens that the model takes.
        cluster, encoding: figures of the GPUs and of encoders on them; by default those of the
            machine's kind of GPU, if it is known.

    Raises:
        NoPlan: the model's memory cannot be estimated.
    """
    planner = create_planner(
        *(config, towers, machine, file_bytes, text_tokens, lengths, cluster, encoding)
    )
    return planned(planner)


def planned(planner: Planner) -> Plan:
    """The plan of the planner's configuration, with a suggestion if it does not fit."""
    config = planner.config
    plan = auto_plan(planner) if config.micro_batch_size == "auto" else planner.plan(config)
    return plan if plan.fits else replace(plan, problem=advice(planner, plan))


def create_planner(
    config: TrainConfig,
    towers: Towers,
    machine: Machine,
    file_bytes: float | None = None,
    text_tokens: int | None = None,
    lengths: TextLengths | None = None,
    cluster: Cluster | None = None,
    encoding: Encoding | None = None,
) -> Planner:
    """The planner of `make_plan`, with its arguments."""
    if text_tokens is not None:
        lengths = TextLengths({tower: (text_tokens,) for tower in towers.lengths})
    if lengths is not None and not lengths.samples:
        lengths = None
    if cluster is None and machine.device == "cuda":
        cluster = usual_cluster(machine.name, machine.count)
    encoding = encoding or encoding_named(machine.name)
    return Planner(config, towers, machine, file_bytes, lengths, cluster, encoding)


def auto_plan(planner: Planner) -> Plan:
    """The plan with the size of a run that measures none, or with the next one that fits.

    On a GPU a run may choose a larger one: a note has the largest.
    """
    rows = -(-planner.config.global_batch_size // planner.machine.count)
    size = min(unmeasured_micro_batch(planner.config), rows)
    plan = planner.plan(replace(planner.config, micro_batch_size=size))
    normalised = any(isinstance(m, BATCH_NORMS) for m in planner.towers.module.modules())
    if planner.machine.device == "cpu" or normalised:
        return plan
    if plan.peak > planner.machine.limit:
        size = 1 << _largest_micro_batch(planner, planner.config, size).bit_length() >> 1 or 1
        plan = planner.plan(replace(planner.config, micro_batch_size=size))
    largest = _largest_measured(planner, size, rows) if plan.fits else size
    counted = f"micro-batch size auto: counted with {plural(size, 'pair')} at a time"
    if largest > size:
        counted += f"; a run takes the fastest of the sizes that fit, up to {largest:,}"
    return replace(plan, notes=(counted, *plan.notes))


def _largest_measured(planner: Planner, size: int, rows: int) -> int:
    """The largest size that fits: `size`, doubled some times, or all `rows`."""
    if size == rows:
        return size
    between = size, min(2 * size, rows)
    fitting = size
    for value in [*_doubled(2 * size, rows), rows]:
        larger = replace(planner.config, micro_batch_size=value)
        if not planner.memory(larger, between=between).fits:
            break
        fitting = value
    return fitting


def largest_batch(planner: Planner, plan: Plan) -> int:
    """The largest global batch that fits with the micro-batches of a plan that fits, to 3%."""
    config = replace(plan.config, activation_memory="0")

    def fits(value: int) -> bool:
        return planner.memory(replace(config, global_batch_size=value)).fits

    above = 8 * config.global_batch_size
    while fits(above):
        above *= 8
    return max(_bisect(fits, above), config.global_batch_size)


def advice(planner: Planner, plan: Plan) -> str:
    """The reason why a plan does not fit, and settings that would."""
    config, machine = plan.config, plan.machine
    if machine.host is not None and plan.host_total > machine.host:
        what = f"{_giga(plan.host_total)} of the host's {_giga(machine.host)}"
        if planner.file_bytes is None and planner.towers.first == "image":
            what += " (--decode late would keep image files there instead of pixels)"
    else:
        worst = max(PHASES, key=plan.total)
        what = f"{_giga(plan.peak)} of {_giga(machine.limit)} in the phase {worst!r}"
    return f"does not fit: it needs {what}; {_suggestion(planner, config)}"


def _suggestion(planner: Planner, config: TrainConfig) -> str:
    rows = -(-config.global_batch_size // planner.machine.count)
    size = _largest_micro_batch(planner, config, min(unmeasured_micro_batch(config), rows))
    if size:
        return f"--micro-batch-size {size} fits"
    config = replace(config, micro_batch_size=1)
    size = _largest_batch(planner, config)
    if not size:
        more = "" if config.grad_checkpointing else ", --grad-checkpointing"
        return f"no batch fits: a smaller model{more} or --parallel fsdp on more GPUs would"
    smaller = f"--global-batch-size {size} does, with a small --micro-batch-size"
    count = _enough(planner, config)
    return f"no micro-batch size fits; {smaller}" + (f"; so do {count} GPUs" if count else "")


def _largest_micro_batch(planner: Planner, config: TrainConfig, size: int) -> int:
    """The largest micro-batch below `size` that fits; 0 if none does.

    A micro-batch's memory is counted at two sizes and interpolated linearly, which is accurate
    except for small ones; the answer is counted again.
    """
    half = max(1, size // 2)
    if half == size:
        return 0

    def fits(value: int) -> bool:
        smaller = replace(config, micro_batch_size=value)
        return planner.memory(smaller, between=(half, size)).fits

    found = _bisect(fits, size)
    while found and not planner.memory(replace(config, micro_batch_size=found)).fits:
        found = found * 7 // 8
    return found


def _largest_batch(planner: Planner, config: TrainConfig) -> int:
    """The largest global batch below the configuration's that fits; 0 if none does."""

    def fits(value: int) -> bool:
        return planner.memory(replace(config, global_batch_size=value)).fits

    return _bisect(fits, config.global_batch_size)


def _enough(planner: Planner, config: TrainConfig) -> int:
    """The number of devices that would suffice, up to 64 times as many; 0 if these do not."""
    for factor in (2, 4, 8, 16, 32, 64):
        machine = replace(planner.machine, count=planner.machine.count * factor)
        if planner.memory(config, machine).fits:
            return machine.count
    return 0


def _doubled(size: int, below: int) -> Iterator[int]:
    """A size, doubled again and again, as long as it is below a bound."""
    while size < below:
        yield size
        size *= 2


def _bisect(fits: Callable[[int], bool], above: int) -> int:
    """The largest number below `above` that fits, to 3%, as a round number; 0 if none does."""
    low, high = 0, above
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    grain = 1 << max(0, low.bit_length() - 5)  # a power of two, at most 1/16 of `low`
    return low // grain * grain


def _giga(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
