"""`megabatch plan`."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from megabatch.data.late import mean_bytes
from megabatch.errors import UsageError
from megabatch.planning.machine import Machine, other_machine, parse_bytes, this_machine
from megabatch.planning.plan import make_plan
from megabatch.planning.show import print_plan, to_json
from megabatch.training.command import parse
from megabatch.training.config import TrainConfig, problems, resolve_device
from megabatch.training.setup import open_data
from megabatch.training.towers import build_towers

_DESCRIPTION = """Say what a run would take of each GPU's memory, and whether it fits.

Takes the options of `megabatch train` (megabatch train --help), and those below. With --decode late
it looks at the sizes of some of the images.

  --gpus N           GPUs, or processes on the CPU (default: 1)
  --gpu-memory SIZE  plan for GPUs of this size, 80GiB say, on another machine
  --gpu-name NAME    what they are; where the loss was measured on such, its time is told
  --json             as JSON, sizes in bytes

The exit code is 0 where the run fits and 1 where it does not."""


def main(argv: list[str]) -> int:
    """Plan as the options say; returns the exit code."""
    outer = argparse.ArgumentParser(
        prog="megabatch plan",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="megabatch plan [OPTIONS]",
        allow_abbrev=False,
    )
    outer.add_argument("--gpus", type=int, default=1, help=argparse.SUPPRESS)
    outer.add_argument("--gpu-memory", help=argparse.SUPPRESS)
    outer.add_argument("--gpu-name", default="", help=argparse.SUPPRESS)
    outer.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    chosen, options = outer.parse_known_args(argv)
    config = parse(options)
    if reasons := problems(config):
        raise UsageError(
            "\n  - ".join(["several things:", *reasons]) if reasons[1:] else reasons[0]
        )
    files = mean_bytes(open_data(config)) if config.decode == "late" else None
    plan = make_plan(config, build_towers(config), _machine(chosen, config), file_bytes=files)
    if chosen.json:
        print(json.dumps(to_json(plan), indent=1))
    else:
        console = Console(highlight=False, soft_wrap=True)
        print_plan(plan, console)
        console.print(plan.problem or "fits")
    return 0 if plan.fits else 1


def _machine(chosen: argparse.Namespace, config: TrainConfig) -> Machine:
    if chosen.gpus < 1:
        raise UsageError(f"gpus: {chosen.gpus}; expected at least 1")
    if chosen.gpu_memory is None:
        return this_machine(resolve_device(config.device), chosen.gpus)
    try:
        return other_machine(chosen.gpus, parse_bytes(chosen.gpu_memory), chosen.gpu_name)
    except ValueError as error:
        raise UsageError(f"gpu_memory: {error}") from error
