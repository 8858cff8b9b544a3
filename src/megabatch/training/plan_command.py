"""`megabatch plan`."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from megabatch.config.file import Start, configure
from megabatch.config.settings import Size, TrainConfig, problems, resolve_device
from megabatch.errors import UsageError, all_of, did_you_mean
from megabatch.options import CONFIG, make, read_words
from megabatch.planning.machine import DATASHEETS, other_machine, this_machine

if TYPE_CHECKING:
    from megabatch.models import Towers
    from megabatch.planning.micro_batches import TextLengths

_DESCRIPTION = """Estimate the memory and the time of a step on each GPU, and whether it fits.

Takes the options of `megabatch train` (packaged configuration: quickstart). If training data are
named, it reads some texts for their lengths, and with --decode late the sizes of some images. Times
are known for H200s, as measured, and for H100, A100, A800 and L40S in proportion to datasheets.
With --micro-batch-size auto it compares sizes by these times. The exit code is 0 if the run fits
and 1 if it does not."""


@dataclass(frozen=True, config=CONFIG)
class PlanOptions:
    """The machine, and texts."""

    gpus: PositiveInt = 1
    """Number of GPUs (of another machine, with 8 to a host), or of processes on the CPU."""
    gpu_memory: Size | None = None
    """Memory per GPU of another machine, such as 80GiB. Default: that of --gpu-name, or this
    machine."""
    gpu_name: str = ""
    """Kind of the GPUs of another machine: H200, H100, A100 (80 GB), A800 or L40S; for another one
    give --gpu-memory."""
    text_tokens: PositiveInt | None = None
    """Tokens of a micro-batch's longest text, where texts are trimmed (--trim-texts). Default: as
    the texts of --train-data in order of length, or all that the model takes."""


def main(argv: list[str]) -> int:
    """Plan as the options say; returns the exit code."""
    classes = (PlanOptions, Start, TrainConfig)
    given = read_words(classes, argv, "megabatch plan", _DESCRIPTION)
    own = {f.name: given.pop(f.name) for f in fields(PlanOptions) if f.name in given}
    options, config = make(PlanOptions, own), configure(given)
    if reasons := problems(config, "model", *["train_data"] * (config.decode == "late")):
        raise UsageError(all_of(reasons))
    memory = _memory(options)
    # --help and errors import as little as possible
    from megabatch.planning import make_plan, print_plan
    from megabatch.terminal import plain_console
    from megabatch.training.setup import build_towers

    towers = build_towers(config)
    if memory is None:
        machine = this_machine(resolve_device(config.device), options.gpus)
    else:
        machine = other_machine(options.gpus, memory, options.gpu_name)
    files, lengths = _data(config, towers, options)
    plan = make_plan(config, towers, machine, file_bytes=files, lengths=lengths)
    print_plan(plan, plain_console())
    return 0 if plan.fits else 1


def _memory(options: PlanOptions) -> int | None:
    """Bytes of each GPU of another machine; None: the plan is for this one."""
    if options.gpu_memory is not None:
        return options.gpu_memory
    if options.gpu_name and options.gpu_name not in DATASHEETS:  # "A100-SXM4-40GB" is another one
        raise UsageError(
            f"--gpu-name {options.gpu_name}: expected one of {', '.join(DATASHEETS)}, or its "
            f"--gpu-memory too{did_you_mean(options.gpu_name, DATASHEETS)}"
        )
    return DATASHEETS[options.gpu_name].capacity if options.gpu_name else None


def _data(
    config: TrainConfig, towers: Towers, options: PlanOptions
) -> tuple[float | None, TextLengths]:
    """The mean bytes of image files that are decoded late, and lengths of texts, if they count."""
    from megabatch.planning.micro_batches import TextLengths
    from megabatch.training.setup import data_for_plan, open_data

    late, tokens = config.decode == "late", options.text_tokens
    given = TextLengths({} if tokens is None else dict.fromkeys(towers.lengths, (tokens,)))
    if not (late or (config.train_data and tokens is None)):
        return None, given
    try:
        files, lengths = data_for_plan(config, open_data(config), towers)
    except UsageError as error:
        if late:
            raise
        print(f"the lengths of texts are not known: {error}", file=sys.stderr)
        return None, given
    return files, given if tokens else lengths
