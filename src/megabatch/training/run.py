"""A training run: everything from a configuration to an exit code."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor

from megabatch.config.file import save_config
from megabatch.config.settings import TrainConfig, activation_bytes
from megabatch.data import Batch
from megabatch.data.late import DecodingStopped
from megabatch.errors import OutOfMemory, UsageError, one_line, plural
from megabatch.planning import NoPlan, make_plan, print_plan, this_machine
from megabatch.ranks import Gone
from megabatch.terminal import plain_console
from megabatch.training import checkpoint
from megabatch.training.checkpoint import Checkpoint, TrainingStopped, load_newest
from megabatch.training.evaluating import best_step, evaluate, figures
from megabatch.training.interrupt import exit_code, signals_recorded
from megabatch.training.log import Meter, Progress, duration, memory_bytes
from megabatch.training.run_folder import locked_file
from megabatch.training.setup import Setup, data_for_plan, prepare
from megabatch.training.trackers import Trackers
from megabatch.training.trainer import Trainer
from megabatch.training.world import World, joined


def train(config: TrainConfig) -> int:
    """Train as configured, into the folder `config.output`.

    If `torchrun` or `srun` started several processes, each of them calls this and they train
    together; rank 0 writes files and prints.

    Args:
        config: the run's settings.

    Returns:
        0; or, after a signal on any rank and a checkpoint, 130 for SIGINT and 75 (EX_TEMPFAIL) for
        SIGTERM and SIGUSR1, which the same command with --resume continues.

    Raises:
        UsageError: the configuration is invalid (nothing was started), or the run had to stop, such
            as TrainingStopped, OutOfMemory, Gone (another process).
        SystemExit: on ranks other than 0, instead of an error that rank 0 raises.
    """
    with Trackers() as trackers, joined(config) as world, _told_once(world):
        console = plain_console(quiet=not world.main)
        setup = prepare(config, world)
        for note in setup.notes:
            console.print(note)
        kept = 0
        if setup.config.plan != "off":
            kept = world.attempt(lambda: _plan(setup, console))
        folder, own = setup.config.output, contextlib.nullcontext()
        with _disk_told(folder), world.attempt(lambda: locked_file(folder) if world.main else own):
            run = Run(setup, console, trackers)
            if world.device.type == "cpu":
                run.trainer.division.kept = min(world.gather(kept))
            received = run.train()
            if received:
                trackers.ended = "interrupted"
                console.print(
                    f"interrupted after step {run.trainer.step:,} of {setup.total_steps:,}; "
                    "the same command with --resume continues"
                )
                return exit_code(received)
            run.finish()
    return 0


@contextlib.contextmanager
def _told_once(world: World) -> Iterator[None]:
    """Let rank 0 alone print an error that all ranks raise."""
    try:
        yield
    except UsageError as error:
        if world.main or isinstance(error, (Gone, DecodingStopped, OutOfMemory)):
            raise  # no other rank knows of it
        raise SystemExit(error.exit_code) from error


@contextlib.contextmanager
def _disk_told(folder: Path) -> Iterator[None]:
    """Turn an error of writing the run's folder, such as a full disk, into one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise TrainingStopped(f"{folder}: {reason}") from error


def _due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps, 0 for never, is due after `step`."""
    return step > 0 and every > 0 and step % every == 0


def _plan(setup: Setup, console: Console) -> int:
    """Print the memory plan; returns how many micro-batches' activations it keeps.

    Raises:
        UsageError: a step cannot fit, and `plan` says to refuse.
    """
    config, world = setup.config, setup.world
    try:
        machine = this_machine(world.device, world.size)
        files, lengths = data_for_plan(config, setup.loader.dataset, setup.towers)
        plan = make_plan(config, setup.towers, machine, file_bytes=files, lengths=lengths)
    except NoPlan as error:
        effect = "; no activations are kept" if activation_bytes(config, world.device.type) else ""
        console.print(f"{error}{effect}")
        return 0
    print_plan(plan, console)
    how = config.plan or ("refuse" if world.device.type == "cuda" else "warn")
    if not plan.fits and how == "refuse":
        raise UsageError(f"{plan.problem} (--plan warn starts nevertheless)")
    return plan.kept


class Run:
    """A run in progress.

    Args:
        setup: the configuration, the model and the data, prepared.
        console: for messages; quiet on all ranks but the first.
        trackers: started here, on the first rank.
    """

    def __init__(self, setup: Setup, console: Console, trackers: Trackers) -> None:
        self.config, self.world, self.loader = setup.config, setup.world, setup.loader
        self.folder = setup.config.output
        self.console, self.trackers = console, trackers
        self.trainer = Trainer(
            setup.config,
            setup.towers.module,
            setup.world.device,
            setup.total_steps,
            setup.world,
            setup.towers.lengths,
            tell=console.print,
        )
        self.meter = Meter(0.0, 0.0)
        self._saved_step: int | None = None
        if self.config.resume:
            self._restore()
        self._place = self.loader.state_dict()  # in the data, after the last step
        if self.world.main:
            save_config(self.config, self.folder / "config.toml")
            if self.trainer.step < setup.total_steps:  # of a finished run that is extended
                for name in ("model.safetensors", "model-ema.safetensors"):
                    (self.folder / name).unlink(missing_ok=True)

    def train(self) -> int:
        """Do the remaining steps and save a checkpoint; returns the signal that ended it, or 0."""
        self._announce()
        if self.world.main:
            self.trackers.start(self.config, self.trainer.step, self.console.print)
        with signals_recorded(announce=self.world.main) as signals:
            received = self._steps(signals)
            self._save()
            # A signal during the last step or its checkpoint: there may be an evaluation to do.
            return received or max(self.world.gather(signals[0] if signals else 0))

    def _steps(self, signals: list[int]) -> int:
        trainer, config = self.trainer, self.config
        progress = Progress(self.console, trainer.total_steps, trainer.step)
        batches, since = self._batches(), trainer.step
        while trainer.step < trainer.total_steps:
            # A resumed run evaluates its first step again: it may have been killed in between.
            if _due(trainer.step, config.val_frequency):
                self._validate()
            if _due(trainer.step, config.checkpoint_every):
                self._save()
            self.meter.mark()
            received, batch = self._next(batches, signals)
            if received:
                return received
            self.meter.mark(waited=True)
            values = trainer.train_step(batch)
            self.loader.count_damaged(batch)
            if (source := self.loader.source_of(batch)) is not None and "loss" in values:
                values |= {"source": source + 1, f"loss_of_source_{source + 1}": values["loss"]}
            del batch  # the loader uses its memory again
            self._place = self.loader.state_dict()
            self.meter.mark()
            if trainer.step == trainer.total_steps or trainer.step % config.log_every == 0:
                pairs = (trainer.step - since) * config.global_batch_size
                since = trainer.step
                record = self._record(values | trainer.scale_values(), self.meter.lap(pairs))
                self.trackers.step(record)
                progress.update(trainer.step, record)
        return 0

    def _validate(self) -> None:
        """Save a checkpoint and evaluate it; this counts as no time of training."""
        started, step = time.perf_counter(), self.trainer.step
        self._save()
        found = figures(self._evaluate(checkpoint.place(self.folder / "checkpoints", step)))
        if found:
            shown = ", ".join(
                f"{name} {value:.2%}"
                for name, value in found.items()
                if name.endswith(("recall@1", "top1"))
            )
            seconds = duration(time.perf_counter() - started)
            self.console.print(f"step {step}: {shown} (evaluated in {seconds})")
        self.meter.leave_out()

    def _evaluate(self, folder: Path) -> dict[str, Any]:
        """Evaluate a folder's weights of this step, and name the step with the best ones so far."""
        config, step = self.config, self.trainer.step
        evaluation = evaluate(config, folder, step, self.world, self.console, self.trackers)
        if self.world.main and evaluation and config.val_frequency:
            figure = next(iter(figures(evaluation)))
            best = best_step(self.folder, config.val_data, figure)
            self.console.print(f"best {figure} so far: step {best}")
        return evaluation

    def _next(self, batches: Iterator[Batch], signals: list[int]) -> tuple[int, Batch]:
        """A signal that any rank received, or 0, and this rank's part of the next batch.

        Raises:
            UsageError: a rank failed to read its data; a checkpoint has been saved.
        """
        failure: UsageError | None = None
        try:
            batch = next(batches)
        except UsageError as error:  # its exit code would say that nothing was started
            failure = TrainingStopped(str(error)) if error.exit_code == 2 else error
        except (OSError, RuntimeError) as error:  # DataLoader raises a RuntimeError for workers
            failure = TrainingStopped(f"reading data: {one_line(error, 500)}")
            failure.__cause__ = error
        own = signals[0] if signals else 0
        status = self.world.gather((own, failure is not None))
        received, failed = zip(*status, strict=True)
        if any(failed):
            self._save()
            self.world.raise_if_any(failure)
        # Of several kinds SIGTERM counts, whose number is the largest.
        return max(received), batch

    def finish(self) -> None:
        """Export the weights, print a summary, and evaluate."""
        trainer, config, weights = self.trainer, self.config, self.folder / "model.safetensors"
        if trainer.ema is not None:
            self._export(trainer.weights(ema=True), self.folder / "model-ema.safetensors")
        self._export(trainer.weights(), weights)
        pairs = trainer.step * config.global_batch_size
        self.console.print(
            f"trained {plural(trainer.step, 'step')}, {plural(pairs, 'pair')}, in "
            f"{duration(self.meter.seconds)}, of which "
            f"{self.meter.waited / max(self.meter.seconds, 1e-9):.1%} waiting for data"
        )
        for line in self.loader.report():
            self.console.print(f"  {line}")
        self.console.print(f"weights: {weights}")
        if "tensorboard" in config.report_to:
            self.console.print(
                f"curves:  tensorboard --logdir {quote(str(self.folder / 'tensorboard'))}"
            )
        if config.val_data is None:
            self.console.print(f"report:  megabatch report {quote(str(self.folder))}")
        elif (evaluation := self._evaluate(self.folder)) and self.world.main:
            from megabatch.evaluation.table import print_evaluation

            print_evaluation(evaluation, self.console)
            self.console.print(f"report:  {self.folder / 'report.html'}")

    def _batches(self) -> Iterator[Batch]:
        """Batches up to the last step, over as many epochs as that takes."""
        while self.trainer.step < self.trainer.total_steps:
            for batch in self.loader:
                yield batch
                del batch
                if self.trainer.step >= self.trainer.total_steps:
                    return

    def _record(self, values: dict[str, float], speed: dict[str, float]) -> dict[str, float]:
        step, division = self.trainer.step, self.trainer.division
        return {
            "step": step,
            "epoch": step / self.loader.batches_per_epoch,  # passes over the data so far
            "samples": step * self.config.global_batch_size,
            **values,
            **speed,
            "seconds": self.meter.seconds,
            "memory_bytes": memory_bytes(self.trainer.device),
            **({"micro_batch_size": division.rows} if division.searches else {}),
            **({"kept_micro_batches": division.kept} if division.kept else {}),
        }

    def _save(self) -> None:
        """Save a checkpoint, unless there is one of this step.

        Raises:
            TrainingStopped: on all ranks; it cannot be written.
        """
        if self._saved_step == self.trainer.step:
            return
        made = self.trainer.checkpoint(
            loader=self._place, seconds=self.meter.seconds, waited=self.meter.waited
        )
        keep = self.config.keep_checkpoints
        self._write(lambda: checkpoint.save(self.folder / "checkpoints", made, keep=keep))
        self._saved_step = self.trainer.step

    def _export(self, state: dict[str, Tensor], path: Path) -> None:
        self._write(lambda: checkpoint.save_tensors(state, path))

    def _write(self, work: Callable[[], object]) -> None:
        """Let rank 0 write; an error of the disk is a UsageError on all ranks."""

        def write() -> None:
            with _disk_told(self.folder):
                work()

        self.world.attempt(write if self.world.main else lambda: None)

    def _restore(self) -> None:
        """Continue from the newest checkpoint, which rank 0 reads for all."""
        folder = self.folder / "checkpoints"
        found = self.world.attempt(lambda: load_newest(folder) if self.world.main else None)
        state = self.world.from_main(None if found is None else found.state)
        if state is None:
            self.console.print(f"{self.folder} has no checkpoint yet: beginning at step 0")
            return
        before, now = state["total_steps"], self.trainer.total_steps
        if state["step"] > now:
            raise TrainingStopped(
                f"--resume: the run has done {plural(state['step'], 'step')} already, more than "
                f"the {now} that were requested"
            )
        if before != now:
            change = f"from {before} to {plural(now, 'step')}"
            self.console.print(f"the run's length changes {change}, and the learning rates with it")
        self.world.attempt(lambda: self.loader.load_state_dict(state["loader"]))
        self.trainer.restore(found or Checkpoint({}, {}, state))
        self.meter = Meter(state["seconds"], state["waited"])
        self._saved_step = self.trainer.step

    def _announce(self) -> None:
        config, trainer, size = self.config, self.trainer, self.world.size
        millions = sum(p.numel() for p in trainer.module.parameters()) / 1e6
        several = f"{size} x {trainer.device.type} ({config.parallel})"
        at_first = " at first" if trainer.division.measures else ""
        tokens = config.micro_batch_tokens
        most = f"at most {plural(tokens, 'token')}" if tokens else f"{trainer.division.rows:,}"
        self.console.print(
            f"{config.model} ({millions:.1f}M parameters) on "
            f"{plural(len(self.loader.dataset), 'pair')} of {config.train_data}: "
            f"{plural(trainer.total_steps, 'step')} of "
            f"{plural(config.global_batch_size, 'pair')}, {most} at a "
            f"time{at_first}, {config.precision} on {trainer.device if size == 1 else several}"
        )
        data = self.loader.dataset
        # With known damage, before hours of training.
        for line in [*getattr(data, "shares", []), *self.loader.report()]:
            self.console.print(f"  {line}")
        if trainer.step:
            self.console.print(f"continuing after step {trainer.step}")
