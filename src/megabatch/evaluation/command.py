"""`megabatch eval RUN`, `megabatch eval --model NAME`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from megabatch.errors import OutOfMemory, UsageError, checks_alone, one_line
from megabatch.evaluation.config import EvalConfig, check, read_config
from megabatch.options import parse

# One rank may be busy for long, reading a hundred thousand files.
_TIMEOUT = timedelta(hours=2)


def main(argv: list[str]) -> int:
    """Evaluate, print the figures and the path of the report; returns the exit code."""
    config = parse(EvalConfig, argv, prog="megabatch eval", positional="run")
    if checks_alone():
        check(config)
        if config.run is not None:
            read_config(config.run)
    from megabatch.evaluation.run import evaluate  # --help imports as little as possible
    from megabatch.evaluation.table import print_evaluation
    from megabatch.ranks import is_first
    from megabatch.terminal import plain_console

    with process_group():
        first = is_first()
        console = plain_console(quiet=not first)
        try:
            evaluation = evaluate(config, console=console)
        except OutOfMemory:  # no other rank knows of it
            raise
        except UsageError as error:
            if first:
                raise
            return error.exit_code  # rank 0 prints errors of all ranks
    print_evaluation(evaluation, console)
    folder = config.output or config.run
    assert folder is not None  # `check` refuses a configuration without either
    console.print(f"{evaluation['seconds']:.0f} s; report: {folder / 'report.html'}")
    return 0


@contextmanager
def process_group() -> Iterator[None]:
    """Form the default process group if torchrun or a similar launcher started several processes.

    Raises:
        UsageError: the environment describes a group, but it cannot be formed.
        Gone: another process died, left or did not come in time.
    """
    import torch
    import torch.distributed as dist

    from megabatch.ranks import lost_rank_told

    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield
        return
    try:
        if torch.cuda.is_available():
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        dist.init_process_group(timeout=_TIMEOUT)  # Gloo, and NCCL where there is CUDA
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"the processes cannot be joined: {one_line(error)}") from error
    with lost_rank_told("evaluating", dist.get_rank(), dist.get_world_size(), "two hours"):
        yield
    dist.destroy_process_group()  # not after an error: it would wait for ranks that may be gone
