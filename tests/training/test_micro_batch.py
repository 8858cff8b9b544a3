"""The micro-batch size that is found: by which trials, the same on all ranks, without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megabatch.config.settings import TrainConfig
from megabatch.data import Batch
from megabatch.errors import OutOfMemory
from megabatch.models.padding import Lengths
from megabatch.models.towers import Tower
from megabatch.training import micro_batch, train
from megabatch.training.micro_batch import Gauge, MicroBatchSize, Search, Trial
from megabatch.training.trainer import Trainer
from megabatch.training.world import World
from tests.similarity.distributed.processes import World as Ranks
from tests.similarity.distributed.processes import on_processes
from tests.training.conftest import MakeConfig
from tests.training.runs import logged
from tests.training.toy import CPU, WIDTH, batch_of, config_of, share_of, toy, trainer_of

MIB = 1 << 20


class Machine:
    """A GPU on paper: each pair takes a MiB, and each micro-batch some seconds more than its pairs.

    On it a pair takes `1 + overhead / size` milliseconds in the first pass and twice that in the
    second.
    """

    def __init__(self, overhead: float, memory: int) -> None:
        self.overhead, self.memory = overhead, memory
        self.now, self.sizes, self.compilation = 0.0, list[int](), 0.0

    def __call__(self, size: int) -> Trial | None:
        self.sizes.append(size)
        pair = 1e-3 * (1 + self.overhead / size)
        self.now += 10 * size * pair + self.compilation
        graph = size * MIB
        if graph > self.memory:
            return None
        return Trial(pair, 2 * pair, graph, graph)

    def search(self, largest: int, room: int | None = None, bound: int | None = 0) -> Search:
        left = self.memory if room is None else room
        world = World(CPU)
        given = (self, largest, world, lambda: left, lambda: self.now)
        return Search(*given, restart=lambda: None, bound=bound)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "SECONDS", 1e9)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("overhead", "memory", "found", "sizes"),
    [
        (0, 1 << 35, 2048, [512, 1024, 2048]),  # nothing is gained by still larger ones
        (400, 1 << 35, 32768, [2**k for k in range(9, 16)]),
        (400, 4096 * MIB, 4096, [512, 1024, 2048, 4096]),  # the next is not even tried
        (400, 4500 * MIB, 4096, [512, 1024, 2048, 4096]),
        (400, 100 * MIB, 64, [512, 256, 128, 64]),
        (400, 1 * MIB, 1, [2**k for k in range(9, -1, -1)]),
    ],
)
def test_sizes_are_doubled_while_that_is_faster_and_fits(
    overhead: float, memory: int, found: int, sizes: list[int]
) -> None:
    machine = Machine(overhead, memory)
    search = machine.search(1 << 20)
    assert search.find() == found
    assert machine.sizes == sizes
    best = min(1 + overhead / 2**k for k in range(9, 20) if 2**k * MIB <= memory or k == 9)
    if found >= micro_batch.FIRST:
        assert (1 + overhead / found) < 1.05 * best
    of = "1 pair" if found == 1 else f"{found:,} pairs"
    told = f"micro-batches of {of}, found in {machine.now:.0f} s"
    assert told in search.summary(found)


def test_no_more_is_tried_than_there_is_time_for() -> None:
    machine = Machine(1e3, 1 << 40)
    search = machine.search(1 << 20)
    found = search.find()
    assert machine.now <= micro_batch.SECONDS
    assert found == max(machine.sizes) < 1 << 12
    machine = Machine(1e3, 1 << 40)
    machine.compilation = 40.0
    assert machine.search(1 << 20).find() == 512  # another 40 s and its trial would be too much
    assert machine.sizes == [512]


@pytest.mark.usefixtures("unhurried")
def test_the_whole_share_is_tried_as_it_is_encoded_once() -> None:
    machine = Machine(0, 1 << 40)
    assert machine.search(12_000).find() == 12_000
    assert machine.sizes == [512, 1024, 2048, 12_000]
    machine = Machine(0, 11_999 * MIB)
    assert machine.search(12_000).find() == 2048
    assert machine.search(100).find() == 100


@pytest.mark.usefixtures("unhurried")
def test_smaller_micro_batches_keep_more_activations() -> None:
    # Of 16,384 pairs 16,000 could wait, in micro-batches of 4,096 only 12,288.
    machine = Machine(80, 16_000 * MIB)
    search = machine.search(16_384, bound=None)
    assert search.find() == 2048
    assert machine.search(16_384).find() == 8192


def test_a_single_pair_is_the_least() -> None:
    assert Machine(0, 4000 * MIB).search(4096, room=-1).find() == 1  # it ran, as it may in a step
    with pytest.raises(OutOfMemory, match="with a single pair"):
        Machine(0, 0).search(4096).find()


@on_processes(2)
def test_ranks_take_the_slowest_ones_measurements(ranks: Ranks) -> None:
    world = World(CPU, ranks.rank, ranks.size)
    own = Machine(400 if ranks.rank else 0, (8000 - 4000 * ranks.rank) * MIB)
    search = Search(
        *(own, 1 << 20, world, lambda: own.memory, lambda: own.now),
        restart=lambda: None,
    )
    assert world.gather(search.find()) == [2048, 2048]
    assert world.gather(own.sizes) == [[512, 1024, 2048]] * 2
    assert search.tried[2048].second == pytest.approx(2e-3 * (1 + 400 / 2048))


class Paper(Gauge):
    """A gauge without a GPU: time passes with each reading, and memory suffices."""

    def __init__(self, usable: int = 1 << 40) -> None:
        super().__init__(CPU)
        self.now, self.room = 0.0, usable

    def seconds(self) -> float:
        self.now += 0.1
        return self.now

    def usable(self) -> int:
        return self.room

    def allocated(self) -> int:
        return 0

    def peak(self) -> int:
        return 1

    def reset(self) -> None:
        pass


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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "FIRST", 2)


def measured(config: TrainConfig, world: World | None = None, **more: Any) -> Trainer:
    """A trainer that measures sizes on the CPU."""
    trainer = trainer_of(replace(config, micro_batch_size="auto"), world, **more)
    trainer.micro_batch.gauge = Paper()
    return trainer


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("changes", "locked"),
    [({}, False), ({}, True), ({"precision": "bf16"}, False), ({"grad_checkpointing": True}, True)],
)
def test_a_search_leaves_no_trace(changes: dict[str, Any], locked: bool) -> None:
    config = config_of(global_batch_size=8, **changes)
    modules = [noisy(), noisy()]
    for module in modules:
        for parameter in module.text.parameters() if locked else ():
            parameter.requires_grad_(False)
    trainer = measured(config, module=modules[0])
    torch.manual_seed(5)
    random = torch.get_rng_state()
    modes = [part.training for part in trainer.module.modules()]
    before = {name: value.clone() for name, value in trainer.module.state_dict().items()}
    arguments = (trainer._step, batch_of(0), trainer.layout, trainer._autocast)
    assert trainer.micro_batch.find(*arguments, optimizer_state=False)
    found = trainer.micro_batch.rows
    assert found == 8  # which is encoded once; time passes alike with all sizes
    assert torch.equal(torch.get_rng_state(), random)
    assert [part.training for part in trainer.module.modules()] == modes
    assert all(parameter.grad is None for parameter in trainer.module.parameters())
    for name, value in trainer.module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not trainer.micro_batch.find(*arguments, optimizer_state=False)

    fixed = trainer_of(replace(config, micro_batch_size=found), module=modules[1])
    again = measured(config, module=modules[0])
    assert again.train_step(batch_of(0)) == fixed.train_step(batch_of(0))
    assert again.micro_batch.rows == found
    for name, value in fixed.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], value), name


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
        self.shapes: set[tuple[int, ...]] = set()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.shapes.add(tuple(tokens.shape))
        return self.embed(tokens).mean(1)


@pytest.mark.usefixtures("small")
def test_texts_are_those_of_the_batch_sorted_and_cut() -> None:
    module = toy()
    module.text = texts = Texts()  # type: ignore[assignment]
    rows = torch.tensor([24, 12, 3, 16, 9, 1, 2, 12])  # lengths
    tokens = (torch.arange(30) < rows[:, None]).long()
    lengths: dict[Tower, Lengths] = {"text": lambda t: t.sum(1)}
    trainer = measured(config_of(global_batch_size=8), module=module, lengths=lengths)
    batch = Batch(batch_of(0).images, tokens, torch.arange(8))
    arguments = (trainer._step, batch, trainer.layout, trainer._autocast)
    trainer.micro_batch.find(*arguments, optimizer_state=False)
    # The third of four micro-batches with two pairs on average, and the second of two with four.
    assert texts.shapes == {(2, 16), (5, 16), (8, 24)} | {
        (2, 30),
        (4, 30),
        (8, 30),  # for the peak: other batches may have longer texts
    }


@pytest.mark.usefixtures("small")
def test_a_size_for_which_memory_runs_out_is_left_out() -> None:
    module = toy()
    module.visual = Full(module.visual, most=4)  # type: ignore[assignment]
    trainer = measured(config_of(global_batch_size=8), module=module)
    trainer.train_step(batch_of(0))
    assert trainer.micro_batch.rows in (2, 4)
    assert "8: " not in trainer.news[0].split("with")[1]


@on_processes(2)
def test_ranks_find_the_same_size_and_train_as_with_it(ranks: Ranks) -> None:
    world = World(CPU, ranks.rank, ranks.size)
    sizes = [5, 3]
    for parallel in ("ddp", "fsdp"):
        config = config_of(global_batch_size=8, parallel=parallel)
        before, micro_batch.FIRST = micro_batch.FIRST, 1
        possible = parallel == "ddp" or hasattr(FSDPModule, "reset_iter_state")
        most = 2 if ranks.rank and possible else 8  # on one rank the others' size does not fit
        module = toy()
        module.visual = Full(module.visual, most)  # type: ignore[assignment]
        try:
            trainer = measured(config, world, module=module)
            found = [trainer.train_step(share_of(batch_of(i), sizes, ranks.rank)) for i in (0, 1)]
        finally:
            micro_batch.FIRST = before
        rows = trainer.micro_batch.rows
        assert trainer.micro_batch.measured
        assert world.gather(rows) == [rows, rows]
        assert rows <= (2 if possible else 5)
        module = toy()
        module.visual = Full(module.visual, 8)  # type: ignore[assignment]
        fixed = trainer_of(replace(config, micro_batch_size=rows), world, module=module)
        steps = [fixed.train_step(share_of(batch_of(i), sizes, ranks.rank)) for i in (0, 1)]
        assert found == steps
        weights = trainer.weights()
        for name, value in fixed.weights().items():
            assert torch.equal(weights[name], value), name


@pytest.mark.usefixtures("small")
def test_a_resumed_run_keeps_its_size_in_the_same_conditions() -> None:
    config = config_of(global_batch_size=8)
    first = measured(config)
    first.train_step(batch_of(0))
    rows = first.micro_batch.rows
    state = json.loads(json.dumps(first.micro_batch.state()))  # as in a checkpoint
    assert state["rows"] == rows

    def after(config: TrainConfig, fresh: Callable[..., Trainer] = measured) -> MicroBatchSize:
        trainer = fresh(config)
        made = first.checkpoint()
        trainer.restore(replace(made, state={**made.state, "micro_batch": state}))
        return trainer.micro_batch

    kept = after(config)
    assert (kept.rows, kept.measured) == (rows, True)
    assert not after(replace(config, grad_checkpointing=True)).measured
    number = after(replace(config, micro_batch_size=3), trainer_of)
    assert (number.rows, number.measured) == (3, False)


@pytest.mark.usefixtures("small")
def test_a_rank_without_pairs_puts_the_search_off() -> None:
    trainer = measured(config_of(global_batch_size=8))
    arguments = (trainer.layout, trainer._autocast)
    none = batch_of(0, size=0)
    assert not trainer.micro_batch.find(trainer._step, none, *arguments, optimizer_state=False)
    assert not trainer.micro_batch.measured


def test_auto_is_a_fixed_size_on_the_cpu_and_with_batch_normalisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(micro_batch_size="auto")
    cpu = MicroBatchSize(config, toy(), World(CPU))
    assert (cpu.rows, cpu.gauge) == (512, None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    gpu = World(torch.device("cuda"))
    assert MicroBatchSize(config, toy(), gpu).gauge is not None
    assert MicroBatchSize(config_of(micro_batch_size=7), toy(), gpu).gauge is None
    normalised = MicroBatchSize(config, nn.Sequential(nn.BatchNorm1d(3)), gpu)
    assert (normalised.rows, normalised.gauge) == (512, None)


@pytest.mark.usefixtures("small")
def test_a_run_says_and_records_what_it_found(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made = MicroBatchSize.__init__

    def with_paper(self: MicroBatchSize, *arguments: Any) -> None:
        made(self, *arguments)
        self.gauge = Paper()

    monkeypatch.setattr(MicroBatchSize, "__init__", with_paper)
    train(make_config(tmp_path, micro_batch_size="auto", steps=2, warmup=1))
    out = capsys.readouterr().out
    assert "8 pairs, micro-batches of a size to be measured, fp32 on cpu" in out
    assert "micro-batches of 8 pairs, found in " in out
    train(make_config(tmp_path, micro_batch_size="auto", steps=3, warmup=1, resume=True))
    assert "8 pairs, 8 at a time" in capsys.readouterr().out
    monkeypatch.setattr(MicroBatchSize, "__init__", made)
    train(make_config(tmp_path, micro_batch_size=4, steps=4, warmup=1, resume=True))
    assert "8 pairs, 4 at a time" in capsys.readouterr().out
    assert [record.get("micro_batch_size") for record in logged(tmp_path)] == [8, 8, 8, None]
