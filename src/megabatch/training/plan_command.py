"""`megabatch plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from megabatch.config.command_line import Start, check, configure, parser
from megabatch.config.problems import problems
from megabatch.config.resolve import name_defaults, resolve
from megabatch.config.settings import TrainConfig, resolve_device, unmeasured_micro_batch
from megabatch.errors import UsageError, all_of, did_you_mean, plural
from megabatch.hints import Interval, is_reference, parse_bytes
from megabatch.planning.simulation.hardware import DATASHEETS, datasheet

if TYPE_CHECKING:
    from megabatch.models import Towers
    from megabatch.planning.lengths import TextLengths
    from megabatch.planning.machine import Machine
    from megabatch.planning.plan import Plan, Planner
    from megabatch.planning.simulation.advice import Advice
    from megabatch.planning.simulation.hardware import Cluster

_DESCRIPTION = """Estimate the memory and the time of a step on each GPU, and whether it fits.

Takes the options of `megabatch train` ({names} are packaged configurations). If training data are
named, it reads some texts for their lengths, and with --decode late the sizes of some images. Times
are known for H200s, as measured, and for H100, A100, A800 and L40S in proportion to datasheets. For
several GPUs it also simulates the loss by each schedule. The exit code is 0 if the run fits and 1
if it does not."""


#: Options that `--help` lists.
_COMMON = (
    *("gpus", "gpu_memory", "gpu_name", "search", "config", "model", "train_data", "loss"),
    *("global_batch_size", "micro_batch_size", "precision", "grad_checkpointing"),
)

#: Share of a network card's nominal rate that transfers reach; assumed, not measured here.
NIC_SHARE = 0.88


@dataclass(frozen=True)
class PlanOptions:
    """The machine, and the output."""

    gpus: Annotated[int, Interval(at_least=1)] = 1
    """Number of GPUs, or of processes on the CPU."""
    gpu_memory: str | None = None
    """Memory per GPU of another machine, such as 80GiB. Default: that of --gpu-name, or this
    machine."""
    gpu_name: str = ""
    """Kind of the GPUs of another machine: H200, H100, A100 (80 GB), A800 or L40S; for another one
    give --gpu-memory."""
    text_tokens: Annotated[int | None, Interval(at_least=1)] = None
    """Tokens of a micro-batch's longest text, where texts are trimmed (trim_texts). Default: as the
    texts of --train-data in order of length, or all that the model takes."""
    search: bool = False
    """Compare sizes of micro-batches by the time of a step, for a known kind of GPU."""
    probe: bool = False
    """Measure the GPU of this machine for some seconds, with blocks of the model."""
    json: bool = False
    """Print JSON, sizes in bytes."""


@dataclass(frozen=True)
class ClusterOptions:
    """The GPUs and the network that are simulated."""

    gpus_per_node: Annotated[int, Interval(at_least=1)] = 8
    """GPUs of a node."""
    nic_gbps: Annotated[float, Interval(above=0)] = 400.0
    """Gigabits per second of one network card; 88% of them count."""
    nics_per_node: Annotated[int | None, Interval(at_least=1)] = None
    """Network cards of a node. Default: one for each GPU."""
    nvlink_gigabytes: Annotated[float | None, Interval(above=0)] = None
    """Gigabytes per second that a GPU receives within a node in a collective. Default: 324, as
    measured on H200s, or in proportion to the datasheet of --gpu-name."""
    network_latency_us: Annotated[float, Interval(at_least=0)] = 14.0
    """Microseconds of a step of a collective from node to node."""
    nvlink_latency_us: Annotated[float, Interval(at_least=0)] = 3.4
    """Microseconds of a step of a collective within a node."""
    product_tflops: Annotated[float | None, Interval(above=0)] = None
    """Rate of large matrix products on one GPU. Default: that of --gpu-name, or 665, of an H200."""
    pairs_per_second: Annotated[float | None, Interval(above=0)] = None
    """Pairs per second that one GPU trains without the loss, to simulate whole steps. Default: as
    estimated, for a known kind of GPU."""


def main(argv: list[str]) -> int:
    """Plan as the options say; returns the exit code."""
    headings = {"gpus": "machine and output", "gpus_per_node": "simulation"}
    classes = (PlanOptions, ClusterOptions, Start, TrainConfig)
    chosen = parser(classes, "megabatch plan", _DESCRIPTION, _COMMON, **headings).parse(argv)
    own = {name: chosen.pop(name) for name in vars(PlanOptions()) if name in chosen}
    options = PlanOptions(**own)
    simulated = {name: chosen.pop(name) for name in vars(ClusterOptions()) if name in chosen}
    network = ClusterOptions(**simulated)
    asked, given = configure(chosen)
    late = asked.decode == "late"
    check(asked, given, "model", *["train_data"] * late)
    memory = _memory(options)
    config, notes = resolve(asked, given)
    # --help and errors import as little as possible
    from megabatch.planning.make import create_planner, largest_batch, planned
    from megabatch.planning.search import search
    from megabatch.training.setup import build_towers

    if reasons := problems(config):
        raise UsageError(name_defaults(all_of(reasons), given))
    for note in notes:
        print(note, file=sys.stderr)
    towers, machine = build_towers(config), _machine(options, config, memory)
    files, lengths = _data(config, towers, options)
    cluster = _cluster(network, machine)
    if isinstance(cluster, str) or not (options.probe or datasheet(machine.name)):
        known = None
    else:
        known = cluster
    planner = create_planner(
        *(config, towers, machine),
        file_bytes=files,
        text_tokens=options.text_tokens,
        lengths=lengths,
        cluster=known,
    )
    if options.probe:
        planner = _probed(planner, config)
        cluster = planner.cluster or cluster
    plan = planned(planner)
    most = largest_batch(planner, plan) if plan.fits and machine.device == "cuda" else None
    tried = search(planner) if options.search else []
    if options.search and not tried:
        raise UsageError(f"--search: the time of a step is not known {_unknown(planner)}")
    show = _print_json if options.json else _print_text
    show(plan, most, tried, _advice(network, cluster, plan, towers))
    return 0 if plan.fits else 1


def _unknown(planner: Planner) -> str:
    """The reason why a plan has no time."""
    config, machine = planner.config, planner.machine
    if planner.cluster is None:
        return f"on {machine.name or ('this GPU' if machine.device == 'cuda' else 'the CPU')}"
    return f"with --loss {config.loss}" if is_reference(config.loss) else "with --precision fp32"


def _print_json(plan: Plan, most: int | None, tried: Sequence[Plan], advice: Advice | str) -> None:
    """Print everything known of a plan, `most`: pairs of the largest batch that fits."""
    from megabatch.planning.show import to_json
    from megabatch.planning.simulation.advice import Advice
    from megabatch.planning.simulation.advice import to_json as advice_to_json

    simulation = advice_to_json(advice) if isinstance(advice, Advice) else None
    found = {"largest_batch_size": most, "search": [to_json(one) for one in tried]}
    print(json.dumps({**to_json(plan), **found, "simulation": simulation}, indent=1))


def _print_text(plan: Plan, most: int | None, tried: Sequence[Plan], advice: Advice | str) -> None:
    """As `_print_json`, for people."""
    from megabatch.planning.search import print_search
    from megabatch.planning.show import print_plan
    from megabatch.planning.simulation.advice import Advice, print_advice
    from megabatch.terminal import plain_console

    console = plain_console()
    print_plan(plan, console)
    if most is not None:
        console.print(f"the largest batch that fits has about {plural(most, 'pair')}")
    if tried:
        print_search(tried, console)
    if isinstance(advice, Advice):
        print_advice(advice, console)
    elif advice:
        console.print(f"the loss is not simulated: {advice}")
    loss = plan.config.loss
    unknown = f" without {loss}, whose memory is unknown" * is_reference(loss)
    console.print(plan.problem or f"fits{unknown}")


def _data(
    config: TrainConfig, towers: Towers, options: PlanOptions
) -> tuple[float | None, TextLengths | None]:
    """The mean bytes of image files that are decoded late, and lengths of texts, if they count."""
    from megabatch.data.late import mean_bytes
    from megabatch.planning.lengths import sampled_lengths
    from megabatch.training.setup import open_data

    late = config.decode == "late"
    cut = config.trim_texts and bool(towers.lengths) and options.text_tokens is None
    if not (late or (cut and config.train_data)):
        return None, None
    try:
        data = open_data(config)
    except UsageError as error:
        if late:
            raise
        print(f"the lengths of texts are not known: {error}", file=sys.stderr)
        return None, None
    return mean_bytes(data) if late else None, sampled_lengths(data, towers) if cut else None


def _memory(options: PlanOptions) -> int | None:
    """Bytes of each GPU of another machine; None: the plan is for this one."""
    if options.gpu_memory is not None:
        try:
            return parse_bytes(options.gpu_memory)
        except ValueError as error:
            raise UsageError(f"--gpu-memory {options.gpu_memory}: {error}") from error
    if not options.gpu_name:
        return None
    if sheet := DATASHEETS.get(options.gpu_name):  # "A100-SXM4-40GB" is another one
        return sheet.memory
    raise UsageError(
        f"--gpu-name {options.gpu_name}: expected one of {', '.join(DATASHEETS)}, or its "
        f"--gpu-memory too{did_you_mean(options.gpu_name, DATASHEETS)}"
    )


def _machine(options: PlanOptions, config: TrainConfig, memory: int | None) -> Machine:
    from megabatch.planning.machine import other_machine, this_machine

    if memory is None:
        return this_machine(resolve_device(config.device), options.gpus)
    return other_machine(options.gpus, memory, options.gpu_name)


def _cluster(options: ClusterOptions, machine: Machine) -> Cluster | str:
    """The GPUs and the network of the options; or why there is none."""
    from megabatch.planning.simulation.hardware import Cluster, Gpu, usual_cluster

    usual = usual_cluster(machine.name, 1)
    gpu = Gpu() if usual is None else usual.gpu
    if options.product_tflops is not None:
        gpu = replace(gpu, product_rate=1e12 * options.product_tflops)
    nvlink = Cluster.nvlink if usual is None else usual.nvlink
    if options.nvlink_gigabytes is not None:
        nvlink = 1e9 * options.nvlink_gigabytes
    try:
        return Cluster(
            *(machine.count, options.gpus_per_node, gpu),
            nvlink=nvlink,
            nic=NIC_SHARE * 1e9 / 8 * options.nic_gbps,
            nics=options.nics_per_node or options.gpus_per_node,
            nvlink_latency=1e-6 * options.nvlink_latency_us,
            network_latency=1e-6 * options.network_latency_us,
        )
    except ValueError as error:
        return str(error)


def _probed(planner: Planner, config: TrainConfig) -> Planner:
    """The planner with the measured figures of this machine's GPU."""
    import torch

    from megabatch.planning.probe import Probe

    if planner.machine.device != "cuda" or not torch.cuda.is_available():
        raise UsageError("--probe: there is no GPU in this machine to measure")
    if planner.cluster is None:
        raise UsageError("--probe: expected whole nodes of --gpus-per-node GPUs")
    rows = -(-config.global_batch_size // planner.machine.count)
    gpu, encoding = Probe(torch.device("cuda")).figures(
        *(planner.towers, planner.sample, min(rows, unmeasured_micro_batch(config))),
        config.precision,
        compiled=planner.compiled,
    )
    print(
        f"measured: products {gpu.product_rate / 1e12:,.0f} TFLOP/s, of which the encoders' reach "
        f"{encoding.products:.0%}; memory {gpu.memory_rate / 1e12:.2f} TB/s",
        file=sys.stderr,
    )
    cluster = replace(planner.cluster, gpu=gpu)
    return replace(planner, cluster=cluster, encoding=encoding)


def _advice(
    options: ClusterOptions, cluster: Cluster | str, plan: Plan, towers: Towers
) -> Advice | str:
    """The simulation of a plan for several GPUs, or why there is none; "": no need to say so."""
    from megabatch.planning.simulation.advice import advise
    from megabatch.planning.simulation.schedules import not_simulated
    from megabatch.planning.simulation.step import Towers as Speed

    machine, config = plan.machine, plan.config
    if machine.device != "cuda" or machine.count == 1:
        return ""
    if why := not_simulated(config.loss, config.hard_negatives):
        return why
    if isinstance(cluster, str):
        return cluster
    rate = options.pairs_per_second
    if rate is None and plan.step is not None:
        rate = -(-config.global_batch_size // machine.count) / plan.step.encoders
    speed = None
    if rate is not None:
        trained = sum(p.nbytes for p in towers.module.parameters() if p.requires_grad)
        speed = Speed(rate, trained, unmeasured_micro_batch(config))
    return advise(plan, cluster, towers.embed_dim, speed)
