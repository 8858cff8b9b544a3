"""Micro-batches: the size that is found, the activations that are kept, and if memory runs out."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
from megabatch.training.micro_batch import FIRST, Division, Room, Trial, first_rows, search
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
        (0, 1 << 15, 1 << 20, 256, 256),  # nothing is gained by still larger ones
        (400, 1 << 15, 1 << 20, 32768, 32768),
        (400, 4096, 1 << 20, 4096, 4096),  # the next is not even tried
        (400, 64, 1 << 20, 64, 64),
        (0, 1 << 25, 12_000, 12_000, 12_000),  # the whole share, as it is encoded once
        (0, 11_999, 12_000, 256, 256),
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


@pytest.mark.parametrize(
    ("memory", "share", "seconds", "found"),
    [
        (4096, 1 << 20, 1e9, 4096),  # pairs of a MiB
        (4095, 1 << 20, 1e9, 2048),
        (4096, 4096, 1e9, 2048),  # the whole share is another matter: it is encoded once
        (4096, 1 << 20, 20, 512),
        (50, 1 << 20, 1e9, 64),
        (4096, 40, 1e9, 40),
    ],
)
def test_the_first_steps_take_as_much_memory_as_they_may(
    memory: int, share: int, seconds: float, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch, "SECONDS", seconds)
    first = min(FIRST, share)
    assert first_rows(first, Machine(100, 0)(first), share, memory * MIB) == found


@pytest.mark.usefixtures("unhurried")
def test_a_size_for_which_memory_runs_out_is_left_out() -> None:
    """The trial of a whole share, whose texts are all as long as the longest."""
    machine, room = Machine(400, 0), Room(4096, 1, 1e12, 0.0, 0.0, 0)

    def attempt(size: int) -> Trial | None:
        return None if size in (512, 4096) else machine(size)

    tried = search(attempt, 64, machine(64), room)
    assert [*tried] == [64, 128, 256, 1024, 2048]
    assert room.fastest(tried) == 2048


def test_no_more_is_tried_than_there_is_time_for() -> None:
    machine = Machine(1e3, 1 << 20)
    assert machine.search(1 << 20) == max(machine.sizes) < 1 << 13


def test_how_many_activations_are_kept() -> None:
    trial = Trial(1.0, graph=16.0, peak=16.0)

    def kept(waiting: float, beside: float, bound: int | None = None, ranks: int = 1) -> int:
        return Room(12, ranks, 100.0, waiting, beside, bound).kept(2, trial)

    assert [kept(30, 4), kept(10, 14), kept(30, 14, 40), kept(30, 4, 1000)] == [4, 5, 2, 4]
    assert [kept(4, -16), kept(4, -16, ranks=2), kept(101, 0), kept(0, 0, 0)] == [6, 5, 0, 0]
    room = Room(12, 1, 100.0, 90.0, 0.0, None)
    assert room.kept(12, trial) == 0  # which is encoded once in any case
    assert room.fits(6, trial)
    assert not room.fits(12, trial)  # its activations wait for the loss
    # One takes no more than the second pass of any other.
    assert Room(12, 1, 21.0, 5.0, 5.0, None).kept(2, trial) == 1
    assert Room(12, 1, 20.0, 5.0, 4.0, None).kept(2, trial) == 0


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> None:
    on_paper(monkeypatch, first=2)


def on_paper(patch: pytest.MonkeyPatch, first: int) -> None:
    """A GPU with as much memory as anyone wants, on which all sizes take equally long.

    Sizes are searched from `first` on.
    """
    patch.setattr(micro_batch, "FIRST", first)
    patch.setattr(micro_batch, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    answers: dict[str, Any] = {"mem_get_info": (1 << 40, 1 << 40), "get_device_name": "a GPU"}
    answers |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0)
    answers |= dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"))
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def measured(config: TrainConfig, world: World | None = None, **more: Any) -> Trainer:
    """A trainer that measures sizes on the CPU."""
    trainer = trainer_of(replace(config, micro_batch_size="auto"), world, **more)
    search_on(trainer.division)
    trainer._step = trainer._divided()
    return trainer


def search_on(division: Division) -> None:
    division.searches = division.measures = True
    division.rows, division._bound = micro_batch.FIRST, None


def noisy() -> nn.Module:
    """A module that leaves traces: it draws random numbers and counts its calls in a buffer."""

    def noise(tower: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        tower.calls += len(inputs[0])
        return nn.functional.dropout(output, 0.1, tower.training)

    module = toy()
    module.visual.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    module.visual.register_forward_hook(noise)
    return module


@pytest.mark.parametrize(
    ("changes", "locked"),
    [({"precision": "bf16"}, False), ({"grad_checkpointing": True}, True)],
)
def test_a_search_leaves_no_trace_and_is_done_once(
    changes: dict[str, Any], locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_paper(monkeypatch, first=4)  # in both steps: more would be the whole share
    config = config_of(global_batch_size=8, micro_batch_size=4, **changes)
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


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize("locked", [False, True])
def test_what_a_step_takes_until_the_gradient_of_its_loss(
    locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the second pass takes, which begins with the kept activations."""
    module, calls, rooms = toy(), list[int](), list[Room]()
    for parameter in module.text.parameters() if locked else ():
        parameter.requires_grad_(False)
    module.visual.register_forward_pre_hook(lambda *_: calls.append(0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: len(calls))

    def search(attempt: object, first: int, trial: Trial, room: Room) -> dict[int, Trial]:
        rooms.append(room)
        return {first: trial}

    monkeypatch.setattr(micro_batch, "search", search)
    trainer = measured(config_of(global_batch_size=8), module=module)
    for seed in range(2):
        calls.clear()  # as memory's peak is reset after the first step
        trainer.train_step(batch_of(seed))
    assert trainer.division.rows == 4
    assert [room.waiting for room in rooms] == [2]  # the first passes
    assert trainer._step._after_loss is None


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize(("compiled", "share"), [(False, 0.25), (True, 0.75)])
@pytest.mark.parametrize(("short_of", "rows"), [(0, 4), (1, 2)])
def test_the_first_step_leaves_room_for_state_and_features(
    compiled: bool, share: float, short_of: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megabatch.training.trainer.compile_blocks", lambda *_: None)
    config = config_of(global_batch_size=8, torchcompile=compiled)
    trainer, batch = measured(config), batch_of(0)
    weights = sum(p.nbytes for p in trainer.module.parameters() if p.requires_grad)
    pair = batch.images[0].nbytes + batch.texts[0].nbytes
    # On paper four pairs take only their inputs and those of the next four.
    needed = 3 * weights + 12 * 2 * WIDTH * 8 + math.ceil(2 * 4 * pair / share)
    monkeypatch.setattr(micro_batch, "usable_memory", lambda _: needed - short_of)
    trainer.train_step(batch)
    assert trainer.division.rows == rows


@pytest.mark.usefixtures("paper")
def test_the_trial_before_the_first_step_compiles_nothing() -> None:
    module, compiled = toy(), set[int]()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        values = (value for value in inputs if not isinstance(value, nn.Parameter))
        compiled.update(len(value) for value in values if value.ndim == 2)
        return graph.forward

    module.visual.forward = torch.compile(module.visual.forward, backend=backend, dynamic=False)
    trainer, sizes = measured(config_of(global_batch_size=8), module=module), list[int]()
    module.visual.first.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    try:
        trainer.train_step(batch_of(0))
    finally:
        torch.compiler.reset()
    assert sizes[:4] == [2] * 4
    assert compiled == {trainer.division.rows} == {4}


@pytest.mark.usefixtures("paper")
def test_texts_are_those_of_the_batch_sorted_and_cut() -> None:
    module, shapes = toy(), []
    module.text = nn.EmbeddingBag(50, WIDTH).double()  # type: ignore[assignment]
    module.text.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    rows = torch.tensor([24, 12, 3, 16, 9, 1, 2, 12])  # lengths
    tokens = (torch.arange(30) < rows[:, None]).long()
    lengths: dict[Tower, Lengths] = {"text": lambda t: t.sum(1)}
    trainer = measured(config_of(global_batch_size=8), module=module, lengths=lengths)
    batch = Batch(batch_of(0).images, tokens, torch.arange(8))
    for _ in range(2):
        trainer.train_step(batch)
    # The second of two micro-batches with four pairs on average, and all pairs.
    assert {*shapes[-8:]} == {(5, 16), (8, 24)}


@on_processes(2)
def test_ranks_find_the_same_size_and_train_as_with_it(ranks: Ranks) -> None:
    world = World(CPU, ranks.rank, ranks.size)
    # If a rank has no pairs, no trial precedes the first step, and `first` stays the size.
    for parallel, sizes in (("ddp", [8, 0]), ("fsdp", [5, 3])):
        shares = [sizes, [5, 3], [5, 3]]
        steps = [share_of(batch_of(seed), shares[seed], ranks.rank) for seed in range(3)]
        config = config_of(global_batch_size=8, parallel=parallel)
        with pytest.MonkeyPatch.context() as patch:
            on_paper(patch, first=1)
            trainer = measured(config, world)
            found = [trainer.train_step(steps[0])]
            assert trainer.division.rows == (1 if 0 in sizes else 2)
            found += [trainer.train_step(batch) for batch in steps[1:]]
        assert (trainer.division.rows, trainer.division.measures) == (4, False)
        fixed = trainer_of(replace(config, micro_batch_size=1), world)
        for values, batch in zip(found, steps, strict=True):
            assert values == pytest.approx(fixed.train_step(batch), rel=1e-9)


@on_processes(2)
def test_ranks_leave_out_a_size_for_which_one_has_no_memory(ranks: Ranks) -> None:
    world = World(CPU, ranks.rank, ranks.size)

    def full(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if ranks.rank == 1 and len(inputs[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    for most in (2, 0):
        with pytest.MonkeyPatch.context() as patch:
            on_paper(patch, first=1)
            trainer = measured(config_of(global_batch_size=8), world)
            trainer.module.visual.register_forward_pre_hook(full)
            step = share_of(batch_of(0), [4, 4], ranks.rank)
            if most == 0:
                with pytest.raises(OutOfMemory, match="in a trial with 1 pair at a time; set --mi"):
                    trainer.train_step(step)
                continue
            for _ in range(2):
                trainer.train_step(step)
        assert (trainer.division.rows, trainer.division.measures) == (2, False)


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
    assert found == [(512, False), (64, True), (7, False), (512, False)]
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
    assert "micro-batches of 8 pairs (pairs/s through the towers: 4: " in out
    train(make_config(tmp_path, micro_batch_size="auto", steps=4, warmup=1, resume=True))
    assert "8 pairs, 8 at a time, fp32" in capsys.readouterr().out
    monkeypatch.setattr(Division, "__init__", made)
    train(make_config(tmp_path, micro_batch_size=4, steps=5, warmup=1, resume=True))
    assert "8 pairs, 4 at a time" in capsys.readouterr().out
    sizes = [record.get("micro_batch_size") for record in logged(tmp_path)]
    assert sizes == [4, 8, 8, 8, None]


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
    def stopped(trainer: Trainer, message: str, kept: int = 0) -> None:
        def full(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            if len(inputs[0]) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")

        trainer.module.visual.register_forward_pre_hook(full)
        trainer.division.kept = kept
        with pytest.raises(OutOfMemory, match=message):
            trainer.train_step(batch_of(0))

    config = config_of(global_batch_size=8)
    stopped(trainer_of(config), "rank 0: out of memory with 2 pairs at a time .*fsdp needs")
    stopped(trainer_of(config), "and 3 micro-batches kept .--resume with a smaller --activ", kept=3)
    by_tokens = trainer_of(config)
    by_tokens.division._tokens = 99
    stopped(by_tokens, "at most 99 tokens at a time .*smaller --micro-batch-tokens, --")
    stopped(measured(config), "in a trial with 2 pairs at a time; set --micro-batch-size to a sma")
