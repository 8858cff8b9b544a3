"""What the loss takes, against what was measured on GPUs and what the allocator gave out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megabatch.config.objective import create_objective
from megabatch.config.settings import TrainConfig
from megabatch.planning import seconds as seconds_of
from megabatch.planning.machine import Speeds, speeds_of
from megabatch.planning.memory import loss_bytes
from megabatch.planning.seconds import loss_seconds, loss_transfers
from megabatch.similarity import settings
from megabatch.similarity.distributed import schedule
from tests.planning.allocator import peak_bytes
from tests.process_state import changed

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def measured(rows, width):
    """The record of CLIP's loss in bfloat16 on one GPU."""
    for name in ("single-gpu", "single-gpu-4m-backward"):
        for record in json.loads((RESULTS / f"{name}.json").read_text())["records"]:
            found = (record["contender"], record["dtype"], record["b"], record["d"])
            done = record["status"] == "ok" and record["backward"]
            if done and found == ("megabatch", "bfloat16", rows, width):
                return record
    raise LookupError((rows, width))


@pytest.mark.parametrize(
    "shape",
    [(65536, 512), (65536, 700), (65536, 2048), (262144, 768), (1048576, 768), (4194304, 512)],
)
def test_memory_of_the_loss_on_an_h200(shape):
    gradients = 2 * 2 * shape[0] * shape[1]  # not in the records
    planned = loss_bytes(TrainConfig(), *shape, torch.bfloat16, "cuda", 1) - gradients
    assert abs(planned / measured(*shape)["extra_bytes"] - 1) < 0.03  # found: 0.2% to 1.1%


OURS = [
    (name, r)
    for name in ("scaling", "scaling-hopper", "rounds-2gpu")
    for r in json.loads((RESULTS / f"{name}.json").read_text())["records"]
    if r["contender"] == "megabatch" and r["status"] == "ok"
]
assert len(OURS) >= 20


@pytest.mark.parametrize(
    ("name", "record"),
    OURS,
    ids=[f"{name}-{r['loss']}-{r['b']}-{r['n_devices']}" for name, r in OURS],
)
def test_memory_and_time_of_the_loss_on_several_h200s(name, record, monkeypatch):
    rows, ranks = record["b"] // record["n_devices"], record["n_devices"]
    config = replace(TrainConfig(), loss=record["loss"])
    planned = loss_bytes(config, rows, 768, torch.bfloat16, "cuda", ranks) - 2 * 2 * rows * 768
    # Found: 0.4% on one, 0.5% where several gather once, 1.3% in rounds, but for two records of
    # scaling.json. When it was made, sums came home to a place of their own (1,048,576 pairs on
    # two: 96 MiB more), the last round was gone before x's gradient (4,194,304: 6% less), and of
    # a single round x's gradient was written after y's sums had come home.
    allowed, older = 0.01, name == "scaling" and record["loss"] == "clip" and ranks > 1
    if ranks > 1 and schedule.round_rows(rows, 2 * 768 * ranks) < rows:
        differs = older and (record["b"], ranks) in ((1048576, 2), (4194304, 4))
        allowed = 0.07 if differs else 0.015
    elif older:
        planned -= 2 * rows * 768
    assert abs(planned / record["extra_bytes"] - 1) < allowed
    if record["b"] >= 65_536:  # for fewer, latencies take most of the time
        if name != "scaling-hopper":  # before there were kernels for Hopper GPUs
            monkeypatch.setattr(seconds_of, "PER_LOGIT_ON_HOPPER", seconds_of.PER_LOGIT)
        config, speeds = replace(config, global_batch_size=record["b"]), Speeds()
        seconds = loss_seconds(config, 768, speeds, ranks)
        seconds += loss_transfers(config, 768, speeds, ranks)
        assert abs(1e3 * seconds / record["ms"] - 1) < 0.06  # found: 3.7%


def test_x_against_itself_takes_both_views_and_gathers_them():
    rows, width = 1024, 768  # of two views
    config = replace(TrainConfig(), loss="ntxent")
    planned = loss_bytes(config, rows // 2, width, torch.bfloat16, "cuda", 16)
    own = (2 + 2 + 4) * rows * width  # a copy of both, its gradient, and sums of products
    assert 0 < planned - own - (2 + 4) * 16 * rows * width < 2 * (16 * rows) * rows + (8 << 20)


def test_of_many_ranks_less_than_a_tile_of_each_is_gathered():
    rows, width, ranks = 4096, 768, 1024
    planned = loss_bytes(TrainConfig(), rows, width, torch.bfloat16, "cuda", ranks)
    in_rounds = settings.DEFAULT_GATHER // schedule.ROUND * (3 + 2 * 2)
    assert 0 < planned - 4 * rows * width - 2 * 2 * rows * width < in_rounds + (512 << 20)


def test_time_of_the_loss_on_an_h200():
    config = replace(TrainConfig(), global_batch_size=65536)
    seconds = loss_seconds(config, 768, speeds_of("NVIDIA H200"), 1)
    assert abs(seconds * 1000 / measured(65536, 768)["ms"] - 1) < 0.05
    assert loss_seconds(config, 768, speeds_of("NVIDIA T4"), 1) is None


@pytest.mark.parametrize(
    ("loss", "workspace", "more"),
    [
        *(("clip", None, {}), ("clip", 1 << 20, {}), ("siglip", None, {}), ("infonce", None, {})),
        *(("ntxent", 2 << 20, {}), ("infonce", None, {"hard_negatives": 2})),
        ("clip", None, {"matryoshka_dims": (64, 128, 256)}),
    ],
)
def test_memory_of_the_loss_on_the_cpu(loss, workspace, more):
    config = TrainConfig(loss=loss, precision="fp32", **more)
    rows, width, negatives = 500, 256, config.hard_negatives
    objective = create_objective(config, group="local")
    with changed("workspace", workspace):
        x, y = (F.normalize(torch.randn(rows, width)).requires_grad_() for _ in range(2))
        scale, bias = (torch.ones((), requires_grad=True) for _ in range(2))
        hard = torch.randn(rows, negatives, width, requires_grad=True) if negatives else None
        more = {"negative_features": hard}
        actual = peak_bytes(lambda: objective(x, y, scale, bias, **more).backward())
        planned = loss_bytes(config, rows, width, torch.float32, "cpu", 1)
    # A block is planned with all its buffers; half of them serve ids and ceilings.
    columns = rows * (1 + negatives)
    assert 0.93 * actual < planned < 1.03 * actual + 3 * 512 * columns * 4


def test_a_locked_tower_and_shards_take_less():
    sizes = (65536, 512, torch.bfloat16, "cuda")
    alone = loss_bytes(TrainConfig(), *sizes, 1)
    assert loss_bytes(TrainConfig(), *sizes, 1, frozenset({"image"})) < alone
    eighth = loss_bytes(TrainConfig(), 65536 // 8, 512, torch.bfloat16, "cuda", 8)
    assert eighth < 0.65 * alone  # blocks of 8,192 rows by all ranks' columns stay
    assert loss_bytes(replace(TrainConfig(), duplicates="positives"), *sizes, 1) == alone
