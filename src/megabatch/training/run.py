"""A training run: everything from a configuration to an exit code."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor

from megabatch.config.file import save_config
from megabatch.config.settings import TrainConfig, activation_bytes
from megabatch.data import Batch
from megabatch.data.late import DecodingStopped
from megabatch.errors import OutOfMemory, UsageError, one_line, plural
from megabatch.evaluation.run_folder import read_metrics
from megabatch.hints import is_reference
from megabatch.planning import NoPlan, make_plan, print_plan, this_machine
from megabatch.planning.plan import graph_bytes
from megabatch.ranks import Gone
from megabatch.terminal import plain_console
from megabatch.training import checkpoint, evaluating
from megabatch.training.batch_norm import explanation
from megabatch.training.checkpoint import Checkpoint, CheckpointError
from megabatch.training.interrupt import Ended, exit_code, signals_end, signals_recorded
from megabatch.training.log import Display, Meter, collapse_advice, duration, memory_bytes
from megabatch.training.parallel import check_replicas
from megabatch.training.run_folder import own_folder
from megabatch.training.setup import Setup, data_for_plan, prepare
from megabatch.training.trackers import Trackers
from megabatch.training.trainer import Trainer, TrainingStopped
from megabatch.training.world import World, joined


def train(
    config: TrainConfig,
    *,
    resume_command: str = "the same with --resume",
) -> int:
    """Train as configured, into the folder `config.output`.

    If `torchrun` or `srun` started several processes, each of them calls this and they train
    together; rank 0 writes files and prints.

    Args:
        config: the run's settings.
        resume_command: the command to print after an interruption.

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
            with joined(config) as world, _told_once(world):
                console = plain_console(quiet=not world.main)
                setup = prepare(config, world)
                config = setup.config
                step, received = _train(setup, console, trackers, resume_command)
                del setup  # its memory is for the evaluation
                if config.val_data is not None and not received:
                    with _continued(console, resume_command):
                        evaluating.evaluate(config, step, world, console, trackers)
        except Ended as ended:
            trackers.ended = "interrupted"
            return int(str(ended.code))
        if received:
            trackers.ended = "interrupted"
    return exit_code(received) if received else 0


def _train(
    setup: Setup, console: Console, trackers: Trackers, resume_command: str
) -> tuple[int, int]:
    """Train; returns the steps done, and the signal that ended it, or 0."""
    config, world = setup.config, setup.world
    for note in setup.notes:
        console.print(note)
    if config.plan != "off":
        world.attempt(lambda: _plan(setup, console))
    with contextlib.ExitStack() as stack:
        own = own_folder(config) if world.main else contextlib.nullcontext()
        world.attempt(lambda: stack.enter_context(own))
        try:
            run = Run(setup, console, trackers)
            received, step = run.train(), run.trainer.step
            if received:
                console.print(
                    f"interrupted after step {step:,} of {setup.total_steps:,}; continue with: "
                    f"{resume_command}"
                )
                return step, received
            with _continued(console, resume_command):
                run.finish()
        except OSError as error:  # a full disk, in the run's own folder
            raise TrainingStopped(f"{config.output}: {error.strerror or error}") from error
    return step, 0


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
def _continued(console: Console, resume_command: str) -> Iterator[None]:
    """Let a signal end what follows the last step, with a line that says how to continue."""
    try:
        with signals_end():
            yield
    except Ended:
        console.print(f"interrupted after the last step; continue with: {resume_command}")
        raise


def _plan(setup: Setup, console: Console) -> None:
    """Print the memory plan; raise a UsageError if a step cannot fit and `plan` says to refuse."""
    config, world = setup.config, setup.world
    try:
        machine = this_machine(world.device, world.size)
        files, lengths = data_for_plan(config, setup.loader.dataset, setup.towers)
        plan = make_plan(config, setup.towers, machine, file_bytes=files, lengths=lengths)
    except NoPlan as error:
        console.print(str(error))
        return
    print_plan(plan, console)
    if plan.fits:
        return
    if (config.plan or ("refuse" if world.device.type == "cuda" else "warn")) == "refuse":
        raise UsageError(f"{plan.problem} (--plan warn starts nevertheless)")


class Run:
    """A run in progress.

    Args:
        setup: the configuration, the model and the data, prepared.
        console: for messages; quiet on all ranks but the first.
        trackers: started by `train` on the first rank.
    """

    def __init__(self, setup: Setup, console: Console, trackers: Trackers) -> None:
        self.trackers = trackers
        self.config = setup.config
        self.world = setup.world
        self.folder = setup.config.output
        self.loader = setup.loader
        self.console = console
        graph = self._planned_graph(setup)  # before the trainer wraps the towers
        self.trainer = Trainer(
            setup.config,
            setup.towers.module,
            setup.world.device,
            setup.total_steps,
            setup.world,
            setup.towers.lengths,
        )
        if graph:
            self.trainer.kept.choose([graph])
        self.meter = Meter(0.0, 0.0)
        self._saved_step: int | None = None
        self._checkpoints = self.folder / "checkpoints"
        self._validation: evaluating.Validation | None = None
        if self.config.val_frequency:
            self._validation = self.world.attempt(
                lambda: evaluating.Validation(self.config, self.world)
            )
        if self.config.resume:
            self._restore()
        self._place = self.loader.state_dict()  # in the data, after the last step
        if self.world.main:
            save_config(self.config, self.folder / "config.toml")

    def train(self) -> int:
        """Do the remaining steps and save a checkpoint; returns the signal that ended it, or 0.

        If a periodic checkpoint or a log record cannot be written, a message says so and training
        continues; the last checkpoint must be written.
        """
        trainer = self.trainer
        if self.world.main and trainer.step < trainer.total_steps:  # a finished run, extended
            for name in ("model.safetensors", "model-ema.safetensors"):
                (self.folder / name).unlink(missing_ok=True)
        self._announce()
        display = Display(self.console, trainer.total_steps, trainer.step)
        with contextlib.ExitStack() as stack:
            if self.world.main:
                self.trackers.start(self.config, trainer.step, self.console.print)
            signals = stack.enter_context(signals_recorded(announce=self.world.main))
            stack.enter_context(display)
            received = self._steps(signals, display)
            self._save(last=True)
            self.trackers.last_step()
            # A signal during the last step or its checkpoint: there may be an evaluation to do.
            return received or max(self.world.gather(signals[0] if signals else 0))

    def _steps(self, signals: list[int], display: Display) -> int:
        trainer, config = self.trainer, self.config
        self.meter.mark()
        check_replicas(trainer.module, self.world)
        batches, since = self._batches(), trainer.step
        while trainer.step < trainer.total_steps:
            received, batch = self._next(batches, signals)
            if received:
                return received
            self.meter.data_came()
            values = trainer.train_step(batch)
            self._report_news()
            self.loader.count_damaged(batch)
            del batch  # the loader uses its memory again
            self._place = self.loader.state_dict()
            self.meter.mark()
            last = trainer.step == trainer.total_steps
            if last or trainer.step % config.log_every == 0:
                values |= trainer.scale_values()
                pairs = (trainer.step - since) * config.global_batch_size
                since = trainer.step
                record = self._record(values, self.meter.lap(pairs))
                self.trackers.step(record)
                display.update(trainer.step, record)
            if config.check_replicas_every and trainer.step % config.check_replicas_every == 0:
                check_replicas(trainer.module, self.world)
            if config.checkpoint_every and trainer.step % config.checkpoint_every == 0 and not last:
                self._save()  # the last one is saved after the loop
            self.meter.mark()
            if config.val_frequency and trainer.step % config.val_frequency == 0 and not last:
                self._validate()
                self.meter.leave_out()
        return 0

    def _validate(self) -> None:
        """Evaluate the weights of this step; the last one's are evaluated after training."""
        assert self._validation is not None
        started, step = time.perf_counter(), self.trainer.step
        weights = self.trainer.weights()
        figures = self._validation.figures(weights)
        if self.world.main:
            found = ", ".join(
                f"{name} {value:.2%}"
                for name, value in figures.items()
                if name.endswith(("recall@1", "top1"))
            )
            seconds = duration(time.perf_counter() - started)
            self.console.print(f"step {step}: {found} (evaluated in {seconds})")
            evaluating.record(
                *(self.config, step, figures),
                lambda path: checkpoint.save_tensors(weights, path),
                *(self.trackers, self.console),
            )

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
            self._save(last=True)
            self.world.raise_if_any(failure)
        # Of several kinds SIGTERM counts, whose number is the largest.
        return max(received), batch

    def finish(self) -> None:
        """Export the weights and print a summary."""
        weights = self.folder / "model.safetensors"
        if self.trainer.ema is not None:
            self._export(self.trainer.weights(ema=True), self.folder / "model-ema.safetensors")
        self._export(self.trainer.weights(), weights)
        pairs = self.trainer.step * self.config.global_batch_size
        self.console.print(
            f"trained {plural(self.trainer.step, 'step')}, {plural(pairs, 'pair')}, in "
            f"{duration(self.meter.seconds)}, of which "
            f"{self.meter.waited / max(self.meter.seconds, 1e-9):.1%} waiting for data"
        )
        if self.trainer.skipped:
            skipped, were = self.trainer.skipped, "was" if self.trainer.skipped == 1 else "were"
            self.console.print(f"  left out {plural(skipped, 'step')} that {were} not finite")
        for line in self.loader.report():
            self.console.print(f"  {line}")
        if self.world.main:
            records = read_metrics(self.folder / "metrics.jsonl")
            if advice := collapse_advice(records, self.config):
                self.console.print(f"  {advice}")
        self.console.print(f"weights: {weights}")
        if "tensorboard" in self.config.report_to:
            self.console.print(
                f"curves:  tensorboard --logdir {quote(str(self.folder / 'tensorboard'))}"
            )
        if self.config.val_data is None:
            self.console.print(f"next:    {next_command(self.config)}")

    def _batches(self) -> Iterator[Batch]:
        """Batches up to the last step, over as many epochs as that takes."""
        while self.trainer.step < self.trainer.total_steps:
            for batch in self.loader:
                yield batch
                del batch
                if self.trainer.step >= self.trainer.total_steps:
                    return

    def _report_news(self) -> None:
        """Print what was decided since the last call."""
        for line in self.trainer.news:
            self.console.print(line)
        self.trainer.news.clear()

    def _record(self, values: dict[str, float], speed: dict[str, float]) -> dict[str, float]:
        step, found = self.trainer.step, self.trainer.micro_batch
        return {
            "step": step,
            "epoch": step / self.loader.batches_per_epoch,  # passes over the data so far
            "samples": step * self.config.global_batch_size,
            **values,
            **speed,
            "seconds": self.meter.seconds,
            "memory_bytes": memory_bytes(self.trainer.device),
            **({"micro_batch_size": found.rows} if found.measured else {}),
            **({"kept_micro_batches": kept} if (kept := self.trainer.kept.count) else {}),
        }

    def _save(self, *, last: bool = False) -> None:
        step = self.trainer.step
        if self._saved_step == step:
            return
        made = self.trainer.checkpoint(
            loader=self._place, seconds=self.meter.seconds, waited=self.meter.waited
        )
        error: CheckpointError | None = None
        try:
            if self.world.main:
                checkpoint.save(self._checkpoints, made, keep=self.config.keep_checkpoints)
        except CheckpointError as caught:
            error = caught
        if last:
            self.world.raise_if_any(error)
        # All ranks must agree on whether it was saved, or they would diverge at the next one.
        if self.world.from_main(error is None):
            self._saved_step = step
        self.console.print(f"{error}; going on") if error else None

    def _export(self, state: dict[str, Tensor], path: Path) -> None:
        error: UsageError | None = None
        if self.world.main:
            try:
                checkpoint.save_tensors(state, path)
            except (OSError, SafetensorError) as caught:
                error = TrainingStopped(f"{path} could not be written: {caught}")
        self.world.raise_if_any(error)

    def _restore(self) -> None:
        """Continue from the newest checkpoint, which rank 0 reads for all."""
        found = self.world.attempt(self._read)
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
            self.console.print(
                f"the run's length changes from {before} to {plural(now, 'step')}, and the "
                "learning rate schedule with it"
            )
        self.world.attempt(lambda: self.loader.load_state_dict(state["loader"]))
        self.trainer.restore(found or Checkpoint({}, {}, state))
        self.meter = Meter(state["seconds"], state["waited"])
        self._saved_step = self.trainer.step

    def _read(self) -> Checkpoint | None:
        if not self.world.main:
            return None
        checkpoint.remove_partial(self._checkpoints)
        found, skipped = checkpoint.load_newest(self._checkpoints) or (None, [])
        for reason in skipped:
            self.console.print(f"{reason}; using the previous one")
        return found

    def _announce(self) -> None:
        config, trainer = self.config, self.trainer
        millions = sum(p.numel() for p in trainer.module.parameters()) / 1e6
        self.console.print(
            f"{config.model} ({millions:.1f}M parameters) on "
            f"{plural(len(self.loader.dataset), 'pair')} of {config.train_data}: "
            f"{plural(trainer.total_steps, 'step')} of "
            f"{plural(config.global_batch_size, 'pair')}, {self._at_a_time()}, {config.precision} "
            f"on {self._where()}"
        )
        if config.workers and not self.loader.processes:
            self.console.print(
                f"  these images are only copied, by one thread; none of the {config.workers} "
                "workers is started"
            )
        data = self.loader.dataset
        notes = [f"note: {line}" for line in getattr(data, "notes", [])]
        # With known damage, before hours of training.
        for line in [*getattr(data, "shares", []), *notes, *self.loader.report()]:
            self.console.print(f"  {line}")
        if warning := explanation(trainer.module, config, self.world):
            self.console.print(warning)
        self._report_news()
        if trainer.step:
            self.console.print(f"continuing after step {trainer.step}")

    def _planned_graph(self, setup: Setup) -> int:
        """Bytes of a micro-batch's activations; 0 if none are kept, or if steps measure them."""
        if self.world.device.type != "cpu" or not activation_bytes(self.config, "cpu"):
            return 0
        try:
            return graph_bytes(self.config, setup.towers, "cpu")
        except NoPlan as error:
            self.console.print(f"--activation-memory has no effect: {error}")
            return 0

    def _at_a_time(self) -> str:
        found = self.trainer.micro_batch
        if found.gauge is not None and not found.measured:
            return "micro-batches of a size to be measured"
        share = -(-self.config.global_batch_size // self.world.size)
        return f"{min(found.rows, share):,} at a time"

    def _where(self) -> str:
        device, size = self.trainer.device, self.world.size
        return str(device) if size == 1 else f"{size} x {device.type} ({self.config.parallel})"


def next_command(config: TrainConfig) -> str:
    """The command that shows what a run has learnt, as far as its data allow.

    An evaluation needs held-out pairs, which only the glyphs come with.
    """
    command = "eval" if config.train_data == "glyphs" else "report"
    trust = " --trust" if command == "eval" and is_reference(config.model) else ""
    return f"megabatch {command} {quote(str(config.output))}{trust}"
