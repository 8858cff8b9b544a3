"""Micro-batches: the size that is found, the activations that are kept, and if memory runs out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megabatch.config.settings import TrainConfig
from megabatch.data import Batch
from megabatch.errors import OutOfMemory, UsageError
from megabatch.models.padding import Lengths
from megabatch.models.towers import Tower
from megabatch.training import micro_batch, train
from megabatch.training.micro_batch import FIRST, Division, Room, Trial, search
from megabatch.training.parallel import lay_out
from megabatch.training.trainer import Trainer
from megabatch.training.world import World
from tests.similarity.distributed.processes import World as Ranks
from tests.similarity.distributed.processes import on_processes
from tests.training.conftest import MakeConfig
from tests.training.runs import logged
from tests.training.toy import CPU, WIDTH, batch_of, config_of, share_of, toy, trainer_of

MIB = 1 << 20


class Machine:
    """A GPU on paper, on which each pair takes a MiB, and each micro-batch a time of its own.

    A pair takes `3 + 3 * overhead / size` milliseconds.
    """

    def __init__(self, overhead: float, pairs: int) -> None:
        self.overhead, self.pairs, self.sizes = overhead, pairs, list[int]()

    def __call__(self, size: int) -> Trial:
        self.sizes.append(size)
        memory = float(size * MIB)
        return Trial(3e-3 * (1 + self.overhead / size), memory, memory)

    def search(self, share: int, bound: int | None = 0) -> int:
        first = min(FIRST, share)
        room = Room(share, 1, self.pairs * MIB, 0.0, 0.0, bound)
        return room.fastest(search(self, first, self(first), room))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "SECONDS", 1e9)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("overhead", "pairs", "share", "found", "last"),
    [
        (0, 1 << 15, 1 << 20, 2048, 2048),  # nothing is gained by still larger ones
        (400, 1 << 15, 1 << 20, 32768, 32768),
        (400, 4096, 1 << 20, 4096, 4096),  # the next is not even tried
        (400, 512, 1 << 20, 512, 512),
        (0, 1 << 25, 12_000, 12_000, 12_000),  # the whole share, as it is encoded once
        (0, 11_999, 12_000, 2048, 2048),
        (0, 1 << 25, 40, 40, 40),
    ],
)
def test_sizes_are_doubled_while_that_is_faster_and_fits(
    overhead: float, pairs: int, share: int, found: int, last: int
) -> None:
    machine = Machine(overhead, pairs)
    assert machine.search(share) == found
    assert machine.sizes[-1] == last
    doubled = [size for size in machine.sizes if size != share]
    assert doubled == [FIRST << k for k in range(len(doubled))]


@pytest.mark.usefixtures("unhurried")
def test_smaller_micro_batches_keep_more_activations() -> None:
    # Of 16,384 pairs 16,000 could wait, in micro-batches of 4,096 only 12,288.
    assert Machine(80, 16_000).search(16_384, bound=None) == 2048
    assert Machine(80, 16_000).search(16_384) == 8192


def test_no_more_is_tried_than_there_is_time_for() -> None:
    machine = Machine(1e3, 1 << 20)
    assert machine.search(1 << 20) == max(machine.sizes) < 1 << 13


def test_how_many_activations_are_kept() -> None:
    trial = Trial(1.0, graph=16.0, peak=16.0)

    def kept(peak: float, beside: float, bound: int | None = None, ranks: int = 1) -> int:
        return Room(12, ranks, 100.0, peak, beside, bound).kept(2, trial)

    assert [kept(30, 4), kept(10, 14), kept(30, 14, 40), kept(30, 4, 1000)] == [4, 5, 2, 4]
    assert [kept(4, -16), kept(4, -16, ranks=2), kept(101, 0), kept(0, 0, 0)] == [6, 5, 0, 0]
    room = Room(12, 1, 100.0, 90.0, 0.0, None)
    assert room.kept(12, trial) == 0  # which is encoded once in any case
    assert room.fits(6, trial)
    assert not room.fits(12, trial)  # its activations wait for the loss


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's answers, with as much memory as anyone wants; sizes are searched from 2 on."""
    monkeypatch.setattr(micro_batch, "FIRST", 2)
    on_paper()


def on_paper() -> None:
    """In a process of its own."""
    zero = dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0)
    answers = {**zero, "mem_get_info": (1 << 40, 1 << 40), "get_device_name": "a GPU"}
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", *answers):
        setattr(torch.cuda, name, partial(_answer, answers.get(name)))


def _answer(answer: object, *_: object) -> object:
    return answer


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    for name in ("get_device_name", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))


def measured(config: TrainConfig, world: World | None = None, **more: Any) -> Trainer:
    """A trainer that measures sizes on the CPU."""
    trainer = trainer_of(replace(config, micro_batch_size="auto"), world, **more)
    search_on(trainer.division)
    trainer._step = trainer._divided()
    return trainer


def search_on(division: Division) -> None:
    division.searches = division.measures = True
    division.rows, division._bound = micro_batch.FIRST, None


class Noisy(nn.Module):
    """Leaves traces: draws random numbers and counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += len(x)
        return nn.functional.dropout(self.tower(x), 0.1, self.training)


def noisy() -> nn.Module:
    module = toy()
    module.visual = Noisy(module.visual)  # type: ignore[assignment]
    return module


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize(
    ("changes", "locked"),
    [({}, False), ({}, True), ({"precision": "bf16"}, False), ({"grad_checkpointing": True}, True)],
)
def test_a_search_leaves_no_trace_and_is_done_once(changes: dict[str, Any], locked: bool) -> None:
    config = config_of(global_batch_size=8, **changes)
    modules = [noisy(), noisy()]
    for module in modules:
        for parameter in module.text.parameters() if locked else ():
            parameter.requires_grad_(False)
    trainer, fixed = measured(config, module=modules[0]), trainer_of(config, module=modules[1])
    for seed in range(2):
        random = torch.get_rng_state()
        assert trainer.train_step(batch_of(seed)) == fixed.train_step(batch_of(seed))
        torch.set_rng_state(random)
    assert (trainer.division.rows, trainer.division.measures) == (8, False)  # encoded once
    for name, value in fixed.module.state_dict().items():
        assert torch.equal(trainer.module.state_dict()[name], value), name
    assert all(parameter.grad is None for parameter in trainer.module.parameters())

    state = json.loads(json.dumps(trainer.division.state()))  # as in a checkpoint

    def after(config: TrainConfig, fresh: Callable[..., Trainer] = measured) -> Division:
        again = fresh(config, module=noisy())
        made = again.checkpoint()
        again.restore(replace(made, state={**made.state, "division": state}))
        return again.division

    kept = after(config)
    assert (kept.rows, kept.measures) == (8, False)
    assert after(replace(config, trim_texts=False)).measures
    assert after(replace(config, micro_batch_size=3), trainer_of).rows == 3


class Full(nn.Module):
    """Runs out of memory with more than `most` rows."""

    def __init__(self, tower: nn.Module, most: int) -> None:
        super().__init__()
        self.tower, self.most = tower, most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.tower(x)
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return features


class Texts(nn.Module):
    """A tower of tokens, which notes the shapes that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH).double()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(tokens.shape))
        return self.embed(tokens).mean(1)


@pytest.mark.usefixtures("paper")
def test_texts_are_those_of_the_batch_sorted_and_cut() -> None:
    module = toy()
    module.text = texts = Texts()  # type: ignore[assignment]
    rows = torch.tensor([24, 12, 3, 16, 9, 1, 2, 12])  # lengths
    tokens = (torch.arange(30) < rows[:, None]).long()
    lengths: dict[Tower, Lengths] = {"text": lambda t: t.sum(1)}
    trainer = measured(config_of(global_batch_size=8), module=module, lengths=lengths)
    batch = Batch(batch_of(0).images, tokens, torch.arange(8))
    for _ in range(2):
        trainer.train_step(batch)
    # The third of four micro-batches with two pairs on average, and the second of two with four.
    assert {*texts.shapes[-12:]} == {(2, 16), (5, 16), (8, 24)}
    assert trainer_of(config_of(), lengths=lengths)._step.longer_texts(
        Batch(tokens[:2, :24], tokens[:2, :24], torch.arange(2))
    ) == pytest.approx(1.0)


@pytest.mark.usefixtures("paper")
def test_the_first_steps_take_at_most_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "SAFE", 1)
    monkeypatch.setattr(micro_batch, "_usable", lambda device: 1000.0)
    for peak, rows in ((200, 2), (300, 1), (10_000, 1)):  # of a pair; with its inputs, 96 bytes
        trainer = measured(config_of(global_batch_size=8))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device, n=peak: n - 96)
        trainer.train_step(batch_of(0))
        assert trainer.division.rows == rows


@on_processes(2)
def test_ranks_find_the_same_size_and_train_as_with_it(ranks: Ranks) -> None:
    on_paper()
    world = World(CPU, ranks.rank, ranks.size)
    sizes, micro_batch.FIRST = [5, 3], 1
    for parallel in ("ddp", "fsdp"):
        config = config_of(global_batch_size=8, parallel=parallel)
        trainer = measured(config, world)
        steps = [share_of(batch_of(seed), sizes, ranks.rank) for seed in range(3)]
        found = [trainer.train_step(batch) for batch in steps]
        rows = trainer.division.rows
        assert not trainer.division.measures
        assert world.gather(rows) == [rows, rows]
        fixed = trainer_of(replace(config, micro_batch_size=1), world)
        for values, batch in zip(found, steps, strict=True):
            assert values == pytest.approx(fixed.train_step(batch), rel=1e-9)


def test_auto_is_a_fixed_size_on_the_cpu_and_with_batch_normalisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def division(config: TrainConfig, module: nn.Module, device: str) -> Division:
        return Division(config, lay_out(module, "ddp", World(torch.device(device))))

    config = config_of(micro_batch_size="auto", activation_memory="0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    cpu, gpu = division(config, toy(), "cpu"), division(config, toy(), "cuda")
    given = division(replace(config, micro_batch_size=7), toy(), "cuda")
    normalised = division(config, nn.Sequential(nn.BatchNorm1d(3)), "cuda")
    found = [(each.rows, each.measures) for each in (cpu, gpu, given, normalised)]
    assert found == [(512, False), (FIRST, True), (7, False), (512, False)]
    keeping = replace(config, micro_batch_size=7, activation_memory="auto")
    assert division(keeping, toy(), "cuda").measures
    assert not division(replace(keeping, global_batch_size=7), toy(), "cuda").measures


@pytest.mark.usefixtures("paper")
def test_a_run_says_and_records_what_it_found(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made = Division.__init__

    def on_gpu(self: Division, *arguments: Any) -> None:
        made(self, *arguments)
        search_on(self)

    monkeypatch.setattr(Division, "__init__", on_gpu)
    train(make_config(tmp_path, micro_batch_size="auto", steps=3, warmup=1))
    out = capsys.readouterr().out
    assert "8 pairs, 2 at a time at first, fp32 on cpu" in out
    assert "micro-batches of 8 pairs (pairs/s through the towers: 2: " in out
    train(make_config(tmp_path, micro_batch_size="auto", steps=4, warmup=1, resume=True))
    assert "8 pairs, 8 at a time, fp32" in capsys.readouterr().out
    monkeypatch.setattr(Division, "__init__", made)
    train(make_config(tmp_path, micro_batch_size=4, steps=5, warmup=1, resume=True))
    assert "8 pairs, 4 at a time" in capsys.readouterr().out
    sizes = [record.get("micro_batch_size") for record in logged(tmp_path)]
    assert sizes == [2, 8, 8, 8, None]


@pytest.mark.usefixtures("counted_once")
def test_on_the_cpu_a_run_keeps_as_many_activations_as_its_plan(
    make_config: MakeConfig, tmp_path: Path, capsys: Any
) -> None:
    changes = {"micro_batch_size": 2, "steps": 2, "warmup": 1, "activation_memory": "1GiB"}
    train(make_config(tmp_path, **changes, plan="warn"))
    assert [record["kept_micro_batches"] for record in logged(tmp_path)] == [4, 4]
    with pytest.raises(UsageError, match="on the CPU it needs a plan, which --plan off"):
        train(make_config(tmp_path / "off", **changes))


@pytest.mark.parametrize("kept", [1, 3, 4])
def test_kept_activations_change_nothing_and_spare_forward_passes(kept: int) -> None:
    reference, trainer = trainer_of(config_of()), trainer_of(config_of())
    trainer.division.kept = kept
    calls: list[None] = []
    trainer.module.visual.register_forward_hook(lambda *_: calls.append(None))
    expected = reference.train_step(batch_of(0))
    assert trainer.train_step(batch_of(0)) == pytest.approx(expected, rel=1e-12)
    assert len(calls) == 8 - kept
    for name, value in reference.module.state_dict().items():
        torch.testing.assert_close(trainer.module.state_dict()[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("paper")
def test_out_of_memory_says_what_needs_less() -> None:
    def stopped(trainer: Trainer, message: str) -> None:
        trainer.module.visual = Full(trainer.module.visual, most=1)
        with pytest.raises(OutOfMemory, match=message):
            trainer.train_step(batch_of(0))

    stopped(trainer_of(config_of()), "rank 0: out of memory with 2 pairs at a time.*fsdp need")
    trainer = trainer_of(config_of())
    trainer.division.kept = 3
    stopped(trainer, "of 3 micro-batches kept; continue with --resume and a smaller --a")
    stopped(measured(config_of()), "out of memory in a trial with 2 pairs at a time; set --micro-b")
