"""A whole run: from a configuration to a folder with weights, logs and checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor

from megabatch.data import Batch
from megabatch.training import checkpoint
from megabatch.training.config import TrainConfig
from megabatch.training.config_file import save_config
from megabatch.training.display import Display, duration
from megabatch.training.interrupt import Interrupt
from megabatch.training.log import MetricsLog, memory_bytes
from megabatch.training.setup import Setup, prepare
from megabatch.training.trainer import Trainer, TrainingStopped


def train(config: TrainConfig, *, resume_command: str = "the same with --resume") -> int:
    """Train as configured; writes `config.output` (see the package's page on run folders).

    `resume_command`: what to tell a user who interrupts.

    Returns:
        0; or 128 + the signal's number where SIGINT or SIGTERM ended it, after a checkpoint.

    Raises:
        UsageError: the configuration is impossible (nothing was started), or the run had to stop:
            TrainingStopped, CheckpointError.
    """
    console = Console(highlight=False, soft_wrap=True)
    setup = prepare(config)
    try:
        run = Run(setup, console)
        received = run.train()
        if received is not None:
            console.print(
                f"interrupted after step {run.trainer.step} of {run.trainer.total_steps}; "
                f"continue with: {resume_command}"
            )
            return 128 + received
        run.finish()
    except OSError as error:  # a full disk, in the run's own folder
        raise TrainingStopped(f"{config.output}: {error.strerror or error}") from error
    if config.evaluate:
        _evaluate(config.output, run, console)
    return 0


class Run:
    """A run in progress."""

    def __init__(self, setup: Setup, console: Console) -> None:
        self.config = setup.config
        self.folder = setup.config.output
        self.loader = setup.loader
        self.console = console
        self.trainer = Trainer(setup.config, setup.towers.module, setup.device, setup.total_steps)
        self.seconds = 0.0  # of training, those before a resume included
        self._saved_step: int | None = None
        self._checkpoints = self.folder / "checkpoints"
        if self.config.resume:
            self._restore()
        self.folder.mkdir(parents=True, exist_ok=True)
        save_config(self.config, self.folder / "config.toml")

    def train(self) -> int | None:
        """Do the steps that are left and save a checkpoint; returns a signal that ended it."""
        trainer, config = self.trainer, self.config
        if trainer.step < trainer.total_steps:  # a finished run that is made longer
            for name in ("model.safetensors", "model-ema.safetensors"):
                (self.folder / name).unlink(missing_ok=True)
        log = MetricsLog(self.folder, trainer.step)
        display = Display(self.console, trainer.total_steps, trainer.step)
        self._announce()
        try:
            with Interrupt() as interrupt, display:
                begun, since = time.perf_counter() - self.seconds, trainer.step
                logged = time.perf_counter()
                for epoch, batch in self._batches():
                    values = trainer.train_step(batch)
                    now = time.perf_counter()
                    self.seconds = now - begun
                    if trainer.step % config.log_every == 0 or trainer.step == trainer.total_steps:
                        pairs = (trainer.step - since) * config.global_batch_size
                        speed, logged, since = pairs / (now - logged), now, trainer.step
                        memory = memory_bytes(trainer.device)
                        log.write(self._record(epoch, values, speed, memory))
                        display.update(trainer.step, values["loss"], speed, memory)
                    if config.checkpoint_every and trainer.step % config.checkpoint_every == 0:
                        self._save()
                    if interrupt.received is not None:
                        break
                self._save()
        finally:
            log.close()
        return interrupt.received if trainer.step < trainer.total_steps else None

    def finish(self) -> None:
        """Export the weights and say what came out."""
        if self.trainer.ema is not None:
            _export(self.trainer.ema.model_state(), self.folder / "model-ema.safetensors")
        weights = self.folder / "model.safetensors"
        _export(self.trainer.module.state_dict(), weights)
        pairs = self.trainer.step * self.config.global_batch_size
        self.console.print(
            f"trained {self.trainer.step} steps, {pairs:,} pairs, in {duration(self.seconds)}"
        )
        for line in self.loader.report():
            self.console.print(f"  {line}")
        self.console.print(f"weights: {weights}")
        self.console.print(f"curves:  tensorboard --logdir {self.folder / 'tensorboard'}")
        if not self.config.evaluate:
            self.console.print(f"next:    megabatch eval {self.folder}")

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        """Batches up to the last step, each with its epoch; an epoch without one is an error."""
        while self.trainer.step < self.trainer.total_steps:
            epoch = self.loader.epoch
            for batch in self.loader:
                yield epoch, batch
                if self.trainer.step >= self.trainer.total_steps:
                    return

    def _record(
        self, epoch: int, values: dict[str, float], speed: float, memory: int
    ) -> dict[str, float]:
        step = self.trainer.step
        return {
            "step": step,
            "epoch": epoch,
            "samples": step * self.config.global_batch_size,
            **values,
            "pairs_per_second": speed,
            "seconds": self.seconds,
            "memory_bytes": memory,
        }

    def _save(self) -> None:
        if self._saved_step != self.trainer.step:
            made = self.trainer.checkpoint(loader=self.loader.state_dict(), seconds=self.seconds)
            checkpoint.save(self._checkpoints, made, keep=self.config.keep_checkpoints)
            self._saved_step = self.trainer.step

    def _restore(self) -> None:
        checkpoint.remove_partial(self._checkpoints)
        found = checkpoint.load_newest(self._checkpoints)
        if found is None:
            self.console.print(f"{self.folder} has no checkpoint yet: beginning at step 0")
            return
        newest, passed_over = found
        for reason in passed_over:
            self.console.print(f"{reason}; taking the one before")
        state = newest.state
        if state["step"] > self.trainer.total_steps:
            raise TrainingStopped(
                f"resume: the run has done {state['step']} steps, asked are "
                f"{self.trainer.total_steps}"
            )
        if state["total_steps"] != self.trainer.total_steps:
            self.console.print(
                f"the run's length changes from {state['total_steps']} to "
                f"{self.trainer.total_steps} steps, the learning rate's schedule with it"
            )
        self.loader.load_state_dict(state["loader"])
        self.trainer.restore(newest)
        self.seconds = state["seconds"]
        self._saved_step = self.trainer.step

    def _announce(self) -> None:
        config, trainer = self.config, self.trainer
        millions = sum(p.numel() for p in trainer.module.parameters()) / 1e6
        self.console.print(
            f"{config.model} ({millions:.1f}M parameters) on {len(self.loader.dataset):,} pairs of "
            f"{config.train_data}: {trainer.total_steps} steps of {config.global_batch_size:,} "
            f"pairs, {config.micro_batch_size:,} at a time, {config.precision} on {trainer.device}"
        )
        if trainer.step:
            self.console.print(f"continuing after step {trainer.step}")


def _export(state: dict[str, Tensor], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        checkpoint.save_tensors(state, partial)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise TrainingStopped(f"{path} could not be written: {error}") from error
    os.replace(partial, path)


def _evaluate(folder: Path, run: Run, console: Console) -> None:
    # Only now: the evaluation brings matplotlib and scikit-learn along.
    from megabatch.evaluation import evaluate_run
    from megabatch.evaluation.table import print_evaluation

    with console.status("evaluating"):
        evaluation = evaluate_run(folder, device=str(run.trainer.device))
    print_evaluation(evaluation, console)
    console.print(f"report:  {folder / 'report.html'}")
