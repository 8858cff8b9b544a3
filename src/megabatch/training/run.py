"""A run in progress: the loop over steps with logs and checkpoints, and the exported weights."""

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
from megabatch.config.settings import TrainConfig, activation_bytes, tracker_names
from megabatch.data import Batch
from megabatch.errors import UsageError, plural
from megabatch.evaluation.run_folder import read_metrics
from megabatch.hints import is_reference
from megabatch.planning.plan import NoPlan, graph_bytes
from megabatch.training import checkpoint
from megabatch.training.batch_norm import explanation
from megabatch.training.checkpoint import Checkpoint, CheckpointError
from megabatch.training.interrupt import signals_recorded
from megabatch.training.log import (
    Display,
    Meter,
    collapse_advice,
    duration,
    memory_bytes,
)
from megabatch.training.parallel import check_replicas
from megabatch.training.setup import Setup
from megabatch.training.trackers import Trackers
from megabatch.training.trainer import Trainer, TrainingStopped
from megabatch.training.validation import Validation, in_words, record


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
        self._validation: Validation | None = None
        if self.config.val_frequency:
            self._validation = self.world.attempt(lambda: Validation(self.config, self.world))
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
            seconds = duration(time.perf_counter() - started)
            self.console.print(f"step {step}: {in_words(figures)} (evaluated in {seconds})")
            record(
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
        rows = 0
        try:
            batch = next(batches)
            rows = len(batch)
        except UsageError as error:  # its exit code would say that nothing was started
            failure = error if hasattr(error, "exit_code") else TrainingStopped(str(error))
        except (OSError, RuntimeError) as error:  # DataLoader raises a RuntimeError for workers
            failure = TrainingStopped(f"reading data: {' '.join(str(error).split())[:500]}")
            failure.__cause__ = error
        own = signals[0] if signals else 0
        status = self.world.gather((own, failure is not None, rows))
        received, failed, shares = zip(*status, strict=True)
        if any(failed):
            self._save(last=True)
            self.world.raise_if_any(failure)
        if sum(shares) > self.config.global_batch_size:
            raise TrainingStopped(
                f"the ranks' parts of a batch have {plural(sum(shares), 'pair')}, expected "
                f"{self.config.global_batch_size}"
            )
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
        if "tensorboard" in tracker_names(self.config):
            self.console.print(
                f"curves:  tensorboard --logdir {quote(str(self.folder / 'tensorboard'))}"
            )
        if not self.config.evaluate:
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
        error = self._write(made) if self.world.main else None
        if last:
            self.world.raise_if_any(error)
        # All ranks must agree on whether it was saved, or they would diverge at the next one.
        if self.world.from_main(error is None):
            self._saved_step = step
        self.console.print(f"{error}; going on") if error else None

    def _write(self, made: Checkpoint) -> CheckpointError | None:
        try:
            checkpoint.save(self._checkpoints, made, keep=self.config.keep_checkpoints)
        except CheckpointError as error:
            return error
        return None

    def _export(self, state: dict[str, Tensor], path: Path) -> None:
        error: UsageError | None = None
        if self.world.main:
            try:
                checkpoint.save_tensors(state, path)
            except (OSError, SafetensorError) as caught:
                error = TrainingStopped(f"{path} could not be written: {caught}")
        self.world.raise_if_any(error)

    def _restore(self) -> None:
        found = self.world.attempt(self._read)
        state = self.world.from_main(None if found is None else found.state)
        if state is None:
            self.console.print(f"{self.folder} has no checkpoint yet: beginning at step 0")
            return
        if state["step"] > self.trainer.total_steps:
            raise TrainingStopped(
                f"--resume: the run has done {plural(state['step'], 'step')} already, more than "
                f"the {self.trainer.total_steps} that were requested"
            )
        if state["total_steps"] != self.trainer.total_steps:
            self.console.print(
                f"the run's length changes from {state['total_steps']} to "
                f"{plural(self.trainer.total_steps, 'step')}, and the learning rate schedule with "
                "it"
            )
        self.world.attempt(lambda: self.loader.load_state_dict(state["loader"]))
        self.trainer.restore(found or Checkpoint({}, {}, state))
        self.meter = Meter(state["seconds"], state.get("waited", 0.0))
        self._saved_step = self.trainer.step

    def _read(self) -> Checkpoint | None:
        if not self.world.main:
            return None
        checkpoint.remove_partial(self._checkpoints)
        found = checkpoint.load_newest(self._checkpoints)
        if found is None:
            return None
        for reason in found[1]:
            self.console.print(f"{reason}; using the previous one")
        return found[0]

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
        for line in getattr(self.loader.dataset, "shares", []):
            self.console.print(f"  {line}")
        for line in getattr(self.loader.dataset, "notes", []):
            self.console.print(f"  note: {line}")
        for line in self.loader.report():  # known damage, before hours of training
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
