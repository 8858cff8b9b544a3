"""A training session: everything from a configuration to an exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console

from megabatch.config.resolve import Given
from megabatch.config.settings import TrainConfig
from megabatch.data.late import DecodingStopped, mean_bytes
from megabatch.errors import OutOfMemory, UsageError
from megabatch.ranks import Gone
from megabatch.terminal import plain_console
from megabatch.training import evaluating
from megabatch.training.interrupt import Ended, exit_code, signals_end
from megabatch.training.run import Run
from megabatch.training.run_folder import own_folder
from megabatch.training.setup import Setup, prepare
from megabatch.training.trackers import Trackers
from megabatch.training.trainer import TrainingStopped
from megabatch.training.world import World, joined


def train(
    config: TrainConfig,
    *,
    resume_command: str = "the same with --resume",
    given: Given | None = None,
) -> int:
    """Train as configured, into the folder `config.output`.

    If `torchrun` or `srun` started several processes, each of them calls this and they train
    together; rank 0 writes files and prints.

    Args:
        config: the run's settings. Of two that conflict, the one from the weaker source changes,
            and a line says so.
        resume_command: the command to print after an interruption.
        given: the sources of the settings. By default, values other than the defaults count as
            options.

    Returns:
        0; or, after a signal on any rank and a checkpoint, 130 for SIGINT and 75 (EX_TEMPFAIL) for
        SIGTERM and SIGUSR1, which the same command with --resume continues.

    Raises:
        UsageError: the configuration is invalid (nothing was started), or the run had to stop, such
            as TrainingStopped, CheckpointError, OutOfMemory, Gone (another process).
        SystemExit: on ranks other than 0, instead of an error that rank 0 raises.
    """
    with Trackers() as trackers:
        try:
            received = _run(config, resume_command, given, trackers)
        except Ended as ended:
            trackers.ended = "interrupted"
            return int(str(ended.code))
        if received:
            trackers.ended = "interrupted"
            return exit_code(received)
    return 0


def _run(config: TrainConfig, resume_command: str, given: Given | None, trackers: Trackers) -> int:
    """Train and evaluate; returns the signal that ended the training, or 0."""
    with joined(config) as world:
        console = plain_console(quiet=not world.main)
        try:
            config, step, received = _train(config, world, console, resume_command, given, trackers)
            evaluate = config.evaluate and not received
            together = evaluate and evaluating.readable(config.output, world)
            if together:
                with _continued(console, resume_command):
                    evaluating.evaluate(config, step, world, console, trackers)
        except UsageError as error:
            if world.main or isinstance(error, (Gone, DecodingStopped, OutOfMemory)):
                raise  # no other rank knows of it
            raise SystemExit(getattr(error, "exit_code", 2)) from error
    if evaluate and not together and world.main:
        with _continued(console, resume_command):
            evaluating.evaluate(config, step, World(world.device), console, trackers)
    return received


@contextlib.contextmanager
def _continued(console: Console, resume_command: str) -> Iterator[None]:
    """What follows the last step; a signal ends it, and a line says how to continue."""
    try:
        with signals_end():
            yield
    except Ended:
        console.print(f"interrupted after the last step; continue with: {resume_command}")
        raise


def _train(
    config: TrainConfig,
    world: World,
    console: Console,
    resume_command: str,
    given: Given | None,
    trackers: Trackers,
) -> tuple[TrainConfig, int, int]:
    """Train; returns the settings, the steps done, and the signal that ended it, or 0.

    The run and its memory are free again when this returns.
    """
    setup = prepare(config, world, given=given)
    config = setup.config
    for note in setup.notes:
        console.print(note)
    if config.plan != "off":
        world.attempt(lambda: _plan(setup, console))
    with contextlib.ExitStack() as stack:
        own = own_folder(config) if world.main else contextlib.nullcontext()
        world.attempt(lambda: stack.enter_context(own))
        try:
            run = Run(setup, console, trackers)
            received = run.train()
            if not received:
                with _continued(console, resume_command):
                    run.finish()
        except OSError as error:  # a full disk, in the run's own folder
            raise TrainingStopped(f"{config.output}: {error.strerror or error}") from error
    if received:
        console.print(
            f"interrupted after step {run.trainer.step:,} of {run.trainer.total_steps:,}; "
            f"continue with: {resume_command}"
        )
    return config, run.trainer.step, received


def _plan(setup: Setup, console: Console) -> None:
    """Print the memory plan; raise a UsageError if a step cannot fit and `plan` says to refuse."""
    from megabatch.planning import NoPlan, make_plan, print_plan, this_machine
    from megabatch.planning.micro_batches import sampled_lengths

    config, world = setup.config, setup.world
    try:
        files = mean_bytes(setup.loader.dataset) if config.decode == "late" else None
        machine = this_machine(world.device, world.size)
        cut = config.trim_texts and setup.towers.lengths
        lengths = sampled_lengths(setup.loader.dataset, setup.towers) if cut else None
        plan = make_plan(config, setup.towers, machine, file_bytes=files, lengths=lengths)
    except NoPlan as error:
        console.print(str(error))
        return
    print_plan(plan, console)
    if plan.fits:
        return
    if (config.plan or ("refuse" if world.device.type == "cuda" else "warn")) == "refuse":
        raise UsageError(f"{plan.problem} (--plan warn starts nevertheless)")
