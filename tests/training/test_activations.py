"""Activations that wait for the second pass: how many the trainer keeps, and if memory runs out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megabatch.config.problems import problems
from megabatch.data import Batch
from megabatch.errors import OutOfMemory
from megabatch.gradient_cache.outputs import StepMemory
from megabatch.models import create
from megabatch.models.padding import Lengths
from megabatch.models.towers import Tower
from megabatch.planning import plan
from megabatch.planning.micro_batches import kept_count
from megabatch.planning.plan import graph_bytes
from megabatch.training import micro_batch, train
from megabatch.training.micro_batch import KeptActivations
from megabatch.training.trainer import Trainer
from megabatch.training.world import World
from tests.models.tiny import TINY
from tests.similarity.distributed.processes import World as Ranks
from tests.similarity.distributed.processes import on_processes
from tests.training.conftest import MakeConfig
from tests.training.runs import logged
from tests.training.toy import CPU, batch_of, config_of, share_of, toy, trainer_of

GIB = 1 << 30


def passes(trainer: Trainer, size: int = 8) -> tuple[dict[str, float], int]:
    """A step's figures, and how often the image tower ran in it."""
    calls: list[None] = []
    hook = trainer.module.visual.register_forward_hook(lambda *_: calls.append(None))
    values = trainer.train_step(batch_of(0, size))
    hook.remove()
    return values, len(calls)


@pytest.mark.parametrize(("graph", "count"), [(300, 3), (100, 4), (1000, 1), (1001, 0)])
def test_as_many_as_the_bytes_allow(graph: int, count: int) -> None:
    reference = trainer_of(config_of())
    expected, calls = passes(reference)
    assert calls == 8
    assert reference._step.memory.graphs == {"the model": [0] * 4}  # bytes of a GPU
    trainer = trainer_of(config_of(global_batch_size=8, activation_memory="1000"))
    trainer.kept.choose([graph])
    found, calls = passes(trainer)
    assert (trainer.kept.count, calls) == (count, 8 - count)
    assert f"activations of {count} of 4 micro-batches" in trainer.news[0]
    assert found == pytest.approx(expected, rel=1e-12)
    for name, value in reference.module.state_dict().items():
        torch.testing.assert_close(trainer.module.state_dict()[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"activation_memory": "auto"}, {"micro_batch_size": 9999}])
def test_none_on_the_cpu_unless_asked_for_and_with_one_micro_batch(changes: dict[str, Any]) -> None:
    if "micro_batch_size" in changes:
        changes = {**changes, "activation_memory": "1GiB"}
    size = changes.get("micro_batch_size", 2)
    assert KeptActivations(config_of(**changes), World(CPU), size).count == 0


def test_what_is_no_size_is_named() -> None:
    (reason,) = problems(config_of(model="m", train_data="d", activation_memory="much"))
    assert reason == "--activation-memory much: expected auto or a size such as 20GiB"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's answers: 100 GiB that tensors can have, a peak of 30."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(micro_batch, "gpu_memory", lambda device: (100 * GIB, 30 * GIB))


def memory_of(graphs: list[int], before: int) -> StepMemory:
    """With graphs of so many GiB, and so many in use before the second pass."""
    return StepMemory({"the model": [n * GIB for n in graphs]}, before * GIB)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("before", "bound", "count"),
    # A graph takes 16 GiB: 30 GiB minus one, and k of them, fit 100 five times; beside 25 four.
    [(10, "auto", 5), (25, "auto", 4), (10, "40GiB", 2), (10, "1TiB", 5)],
)
def test_the_second_step_on_a_gpu_measures(before: int, bound: str, count: int) -> None:
    kept = KeptActivations(config_of(activation_memory=bound), World(torch.device("cuda")), 2)
    memory = memory_of([16, 16, 16, 16, 16, 16], before)
    assert kept.measures
    kept.after_step(memory)
    assert kept.count is None
    kept.after_step(memory)
    assert kept.count == count
    kept.after_step(memory_of([1], 0))
    assert kept.count == count

    again = KeptActivations(config_of(activation_memory=bound), World(torch.device("cuda")), 2)
    again.load_state(json.loads(json.dumps(kept.state())))  # as in a checkpoint
    assert again.count == count
    other = config_of(activation_memory=bound, grad_checkpointing=True)
    anew = KeptActivations(other, World(torch.device("cuda")), 2)
    anew.load_state(kept.state())
    assert anew.measures


@pytest.mark.usefixtures("gpu")
def test_texts_of_later_batches_may_be_longer() -> None:
    kept = KeptActivations(config_of(activation_memory="auto"), World(torch.device("cuda")), 2)
    memory = memory_of([16] * 6, 10)
    for _ in range(2):  # 86 GiB are free, and each graph may take 24
        kept.after_step(memory, longer_texts=1.5)
    assert kept.count == 3
    lengths: dict[Tower, Lengths] = {"text": lambda tokens: tokens.sum(1)}
    tokens = (torch.arange(24) < torch.tensor([[9], [1]])).long()
    for known, longer in ((lengths, 24 / 16), (None, 1.0)):
        trainer = trainer_of(config_of(), lengths=known)
        batch = Batch(tokens, tokens, torch.arange(2))
        assert trainer._step.longer_texts(batch) == longer
        assert trainer._step.longer_texts(share_of(batch, [2, 0], 1)) == 1.0


@pytest.mark.usefixtures("gpu")
def test_shorter_texts_leave_room_for_more_micro_batches() -> None:
    told: list[str] = []
    config = config_of(activation_memory="auto")
    kept = KeptActivations(config, World(torch.device("cuda")), 2, told.append)
    memory = memory_of([40, 30, 20, 14, 12, 10], 0)  # the median, 17, leaves 87
    for _ in range(2):
        kept.after_step(memory)
    assert kept.count == 5
    assert f"({86 / 5 * 1024:,.1f} MiB each) are kept" in told[0]
    runs = [(40, 1), (30, 1), (20, 1)]
    assert kept_count(runs, 3, None, 50) == 2
    assert kept_count(runs, 1, None, 50) == 1
    assert kept_count(runs, 3, None, None) == 3
    assert kept_count([(0, 3)], 3, 0) == kept_count([(9, 3)], 3, -20) == 0
    runs = [(40, 9), (20, 3)]
    assert [kept_count(runs, 12, limit) for limit in (59, 60, 99, 141)] == [2, 3, 3, 5]


class Full(nn.Module):
    """Runs out of memory if more rows than `most` wait in graphs."""

    def __init__(self, tower: nn.Module, most: int) -> None:
        super().__init__()
        self.tower, self.most, self.rows = tower, most, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.rows += len(x)
            if self.rows > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory")
        features: torch.Tensor = self.tower(x)
        if features.requires_grad:
            features.register_hook(lambda _: setattr(self, "rows", self.rows - len(x)))
        return features


def test_a_step_without_memory_is_repeated_with_fewer() -> None:
    expected = trainer_of(config_of()).train_step(batch_of(0))
    trainer = trainer_of(config_of(global_batch_size=8, activation_memory="1000"))
    trainer.module.visual = full = Full(trainer.module.visual, most=4)
    trainer.kept.choose([250])
    trainer.news.clear()
    reset = trainer.optimizer.zero_grad

    def zero_grad(set_to_none: bool) -> None:
        full.rows = 0
        reset(set_to_none)

    trainer.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    assert trainer.train_step(batch_of(0)) == pytest.approx(expected, rel=1e-9)
    assert trainer.kept.count == 2
    assert trainer.news == [
        "out of memory with the activations of 4 micro-batches: the step is repeated with those of "
        "2"
    ]
    full.most = 1
    with pytest.raises(torch.OutOfMemoryError):  # none is kept, and it still does not fit
        trainer.train_step(batch_of(0))
    assert trainer.kept.count == 0


@on_processes(2)
def test_ranks_agree_and_one_that_runs_out_of_memory_alone_stops(ranks: Ranks) -> None:
    world = World(CPU, ranks.rank, ranks.size)
    sizes = [5, 3]
    reference = trainer_of(config_of(global_batch_size=8))
    expected = reference.train_step(batch_of(0))
    for parallel in ("ddp", "fsdp"):
        config = config_of(global_batch_size=12, activation_memory="1000", parallel=parallel)
        trainer = trainer_of(config, world)
        trainer.kept.choose([400 + 300 * ranks.rank])
        assert trainer.kept.count == 1
        found = trainer.train_step(share_of(batch_of(0), sizes, ranks.rank))
        assert found == pytest.approx(expected, rel=1e-9)
        trainer.kept.choose([1])
        assert trainer.kept.count == 2  # of three, the last of which synchronises
    with pytest.raises(OutOfMemory, match=f"rank {ranks.rank}: .* --activation-memory"):
        trainer.kept.fewer(trainer.layout, torch.OutOfMemoryError("of the loss"))


class Fails(nn.Module):
    """Runs out of memory once, with the graph of its n-th micro-batch, forward or backward."""

    def __init__(self, tower: nn.Module, call: int, backward: bool) -> None:
        super().__init__()
        self.tower, self.left, self.in_backward = tower, call, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.tower(x)
        if torch.is_grad_enabled():
            self.left -= 1
            if self.left == 0 and self.in_backward:
                features.register_hook(self.fail)
            elif self.left == 0:
                self.fail()
        return features

    def fail(self, *_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


@on_processes(2)
def test_all_ranks_repeat_a_step_in_which_one_runs_out_of_memory(ranks: Ranks) -> None:
    world = World(CPU, ranks.rank, ranks.size)
    sizes = [5, 3]
    for parallel in ("ddp", "fsdp"):
        for backward in (False, True):
            config = config_of(global_batch_size=12, activation_memory="1000", parallel=parallel)
            module, call = toy(), 2 if ranks.rank else -1
            module.visual = Fails(module.visual, call, backward)  # type: ignore[assignment]
            trainer = trainer_of(config, world, module=module)
            trainer.kept.choose([1])
            assert trainer.kept.count == 2
            if parallel == "fsdp" and not hasattr(FSDPModule, "reset_iter_state"):
                with pytest.raises(OutOfMemory):  # on both ranks, none of which waits
                    trainer.train_step(share_of(batch_of(0), sizes, ranks.rank))
                continue
            found = trainer.train_step(share_of(batch_of(0), sizes, ranks.rank))
            assert trainer.kept.count == 1
            again = trainer.train_step(share_of(batch_of(1), sizes, ranks.rank))
            reference = trainer_of(config_of(global_batch_size=8))
            assert found == pytest.approx(reference.train_step(batch_of(0)), rel=1e-9)
            assert again == pytest.approx(reference.train_step(batch_of(1)), rel=1e-9)
            assert "repeated with those of 1" in trainer.news[-1]


@pytest.mark.usefixtures("counted_once")
def test_a_run_keeps_what_is_planned_and_continues_with_it(
    make_config: MakeConfig, tmp_path: Path, capsys: Any
) -> None:
    config = make_config(tmp_path, micro_batch_size=2, steps=2, warmup=1)
    graph = graph_bytes(config, create(config.model), "cpu")
    config = replace(config, activation_memory=str(3 * graph - 1))
    train(config)
    line = f"the activations of 2 of 4 micro-batches ({graph / 2**20:,.1f} MiB each) are kept"
    assert line in capsys.readouterr().out
    train(replace(config, steps=3, resume=True))
    assert [record["kept_micro_batches"] for record in logged(tmp_path)] == [2, 2, 2]


def test_a_model_that_cannot_be_counted_keeps_none(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("data-dependent output")

    monkeypatch.setattr(plan, "measure", fail)
    train(make_config(tmp_path, activation_memory="1GiB", steps=2, warmup=1))
    out = capsys.readouterr().out
    assert f"--activation-memory has no effect: {TINY} cannot be planned" in out
    assert "kept_micro_batches" not in logged(tmp_path)[0]
