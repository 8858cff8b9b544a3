"""`megabatch plan`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from megabatch.config.command_line import Start, configure, parser
from megabatch.config.problems import problems
from megabatch.config.resolve import resolve
from megabatch.config.settings import TrainConfig, resolve_device
from megabatch.errors import UsageError, all_of
from megabatch.hints import Interval, is_reference, parse_bytes

if TYPE_CHECKING:
    from megabatch.planning.machine import Machine

_DESCRIPTION = """Estimate the memory that a run needs on each GPU, and whether it fits.

Takes the options of `megabatch train` ({names} are packaged configurations). With --decode late it
reads the sizes of some images. The exit code is 0 if the run fits and 1 if it does not."""


@dataclass(frozen=True)
class PlanOptions:
    """The machine, and the output."""

    gpus: Annotated[int, Interval(at_least=1)] = 1
    """Number of GPUs, or of processes on the CPU."""
    gpu_memory: str | None = None
    """Memory per GPU of another machine, such as 80GiB. Default: this machine."""
    gpu_name: str = ""
    """Name of the GPUs of another machine; for a measured kind the time of the loss is estimated.
    """
    text_tokens: Annotated[int | None, Interval(at_least=1)] = None
    """Tokens of a micro-batch's longest text, where texts are trimmed (trim_texts). Default: all
    that the model takes, which some text of a large batch usually has."""
    json: bool = False
    """Print JSON, sizes in bytes."""


def main(argv: list[str]) -> int:
    """Plan as the options say; returns the exit code."""
    headings = {"gpus": "machine and output"}
    classes = (PlanOptions, Start, TrainConfig)
    chosen = parser(classes, "megabatch plan", _DESCRIPTION, **headings).parse(argv)
    own = {name: chosen.pop(name) for name in vars(PlanOptions()) if name in chosen}
    options = PlanOptions(**own)
    config, notes = resolve(*configure(chosen))
    from rich.console import Console  # --help imports as little as possible

    from megabatch.data.late import mean_bytes
    from megabatch.planning.plan import make_plan
    from megabatch.planning.show import print_plan, to_json
    from megabatch.training.setup import build_towers, open_data, unnamed

    late = config.decode == "late"
    if lacking := unnamed(config, "model", *["train_data"] * late):
        raise UsageError(lacking)
    if reasons := problems(config):
        raise UsageError(all_of(reasons))
    for note in notes:
        print(note, file=sys.stderr)
    files = mean_bytes(open_data(config)) if late else None
    plan = make_plan(
        *(config, build_towers(config), _machine(options, config)),
        file_bytes=files,
        text_tokens=options.text_tokens,
    )
    if options.json:
        print(json.dumps(to_json(plan), indent=1))
    else:
        console = Console(highlight=False, soft_wrap=True)
        print_plan(plan, console)
        unknown = f" without {config.loss}, whose memory is unknown" * is_reference(config.loss)
        console.print(plan.problem or f"fits{unknown}")
    return 0 if plan.fits else 1


def _machine(options: PlanOptions, config: TrainConfig) -> Machine:
    from megabatch.planning.machine import other_machine, this_machine

    if options.gpu_memory is None:
        return this_machine(resolve_device(config.device), options.gpus)
    try:
        return other_machine(options.gpus, parse_bytes(options.gpu_memory), options.gpu_name)
    except ValueError as error:
        raise UsageError(f"--gpu-memory {options.gpu_memory}: {error}") from error
