"""Gradient caching on two Gloo processes against one process with the whole batch, in float64."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from megabatch.gradient_cache import GradientCache
from megabatch.training.world import leave
from tests.gradient_cache.parallel import (
    MICRO_BATCH_SIZES,
    WIDTH,
    Gather,
    Tower,
    batches_of,
    count_reductions,
    gradients,
    new_model,
    under_fsdp,
)
from tests.similarity.distributed.processes import join, start

WORLD = 2
SHARDS = {"equal": (4, 4), "unequal": (5, 1), "reversed": (3, 6), "empty": (0, 5), "last": (3, 0)}


class CountReduceScatter(TorchDispatchMode):
    """Counts FSDP2's reductions of gradients."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def clip_loss(x, y, scale):
    labels = torch.arange(len(x))
    logits = scale * x @ y.T
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def distributed_clip_loss(x, y, scale, sizes):
    """n_ranks * (sum over local rows and columns) / (global count)."""
    labels = torch.arange(len(x)) + sum(sizes[: dist.get_rank()])
    rows = F.cross_entropy(scale * x @ Gather.apply(y, sizes).T, labels, reduction="sum")
    columns = F.cross_entropy(scale * y @ Gather.apply(x, sizes).T, labels, reduction="sum")
    return dist.get_world_size() * (rows + columns) / (2 * sum(sizes))


def counting_ddp(module, counts):
    """The module under DDP; its reductions, of one bucket, are counted."""
    wrapped = DistributedDataParallel(module)
    count_reductions(wrapped, counts)
    return wrapped


def one_ddp_model(model, counts):
    return counting_ddp(model, counts), lambda x, y, scale, sizes: distributed_clip_loss(
        x, y, scale, sizes
    )


def two_ddp_encoders(model, counts):
    encoders = (counting_ddp(model.image, counts), counting_ddp(model.text, counts))
    return encoders, lambda x, y, sizes: distributed_clip_loss(x, y, 3.0, sizes)


def methods_of_a_model_of_two_ddp_towers(model, counts):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.image = counting_ddp(model.image, counts)
            self.text = counting_ddp(model.text, counts)

        def encode_image(self, x):
            return self.image(x)

        def encode_text(self, x):
            return self.text(x)

    pair = Pair()
    encoders = (functools.partial(pair.encode_image), pair.encode_text)
    return encoders, lambda x, y, sizes: distributed_clip_loss(x, y, 3.0, sizes)


def one_ddp_encoder_for_both(model, counts):
    tower = counting_ddp(model.image, counts)
    return (tower, tower), lambda x, y, sizes: distributed_clip_loss(x, y, 3.0, sizes)


def ddp_hidden_in_an_object(model, counts):
    class Holder:
        def __init__(self):
            self.parts = SimpleNamespace(model=counting_ddp(model, counts))

        def encode(self, *batches):
            return self.parts.model(*batches)

    return Holder().encode, distributed_clip_loss


def fsdp_model(model, counts):
    return under_fsdp(model), distributed_clip_loss


def two_fsdp_encoders(model, counts):
    mesh = init_device_mesh("cpu", (WORLD,))
    encoders = (fully_shard(model.image, mesh=mesh), fully_shard(model.text, mesh=mesh))
    return encoders, lambda x, y, sizes: distributed_clip_loss(x, y, 3.0, sizes)


def locked_in_a_ddp_model(model, counts):
    model.image.requires_grad_(False)
    return one_ddp_model(model, counts)


def locked_in_a_fsdp_model(model, counts):
    model.image.requires_grad_(False)
    return fsdp_model(model, counts)


# How the model is wrapped, and the number of reductions per step (None: not counted).
SETUPS = {
    one_ddp_model: 1,
    two_ddp_encoders: 2,
    methods_of_a_model_of_two_ddp_towers: 2,
    one_ddp_encoder_for_both: 1,
    ddp_hidden_in_an_object: None,
    fsdp_model: 3,  # each of the three sharded modules once
    two_fsdp_encoders: 2,
    locked_in_a_ddp_model: 1,
    locked_in_a_fsdp_model: 2,
}
LOCKED = (locked_in_a_ddp_model, locked_in_a_fsdp_model)
LEARNT_SCALE = (one_ddp_model, ddp_hidden_in_an_object, fsdp_model, *LOCKED)


def reference_gradients(setup, whole, steps):
    """Gradients of one process with the whole batch, for the same use of the model."""
    model = new_model()
    model.image.requires_grad_(setup not in LOCKED)
    images, texts = whole
    for _ in range(steps):
        x = model.image(images)
        y = (model.image if setup is one_ddp_encoder_for_both else model.text)(texts)
        loss = clip_loss(x, y, model.scale.exp() if setup in LEARNT_SCALE else 3.0)
        loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def backpropagated(loss):
    loss.backward()
    return loss.detach()


def run_case(setup, sizes, micro_batch_size, rank, steps=2):
    """Largest errors of loss and gradients, and reductions per step, of one setup on this rank."""
    shard, whole = batches_of(rank, sizes)
    expected_loss, expected = reference_gradients(setup, whole, steps)
    model, counts = new_model(), []
    encoders, loss = setup(model, counts)
    step = GradientCache(encoders, loss, micro_batch_size)
    with CountReduceScatter() as scattered:
        values = [backpropagated(step(*shard, sizes=sizes)) for _ in range(steps)]
    dist.all_reduce(values[-1], dist.ReduceOp.SUM)

    error = 0.0
    for name, gradient in gradients(model).items():
        if expected[name] is None:
            error = max(error, 0.0 if gradient is None else float("inf"))
        else:
            error = max(error, (gradient - expected[name]).abs().max().item())
    return {
        "loss_error": abs(values[-1].item() / WORLD - expected_loss),
        "gradient_error": error,
        "reductions": (len(counts) + scattered.count) / steps,
    }


def worker(rank, size, port, folder):
    torch.set_default_dtype(torch.float64)
    join(rank, size, port)
    results = {
        f"{setup.__name__} {name} {size}": run_case(setup, sizes, size, rank)
        for setup in SETUPS
        for name, sizes in SHARDS.items()
        for size in MICRO_BATCH_SIZES
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    leave()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of all cases on each rank, from one start of the processes."""
    folder = tmp_path_factory.mktemp("ranks")
    for process in start(WORLD, worker, folder):
        process.join(240)
        assert process.exitcode == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.fixture
def _one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_a_static_graph_is_refused():
    encoder = DistributedDataParallel(Tower(), static_graph=True)
    with pytest.raises(ValueError, match="static_graph"):
        GradientCache((encoder, encoder), clip_loss, 2)(
            torch.ones(4, WIDTH), torch.ones(4, WIDTH)
        ).backward()


@pytest.mark.usefixtures("_one_process")
def test_delayed_reductions_are_refused():
    tower = Tower()
    encoder = DistributedDataParallel(
        tower,
        delay_all_reduce_named_params=[*tower.second.named_parameters("second")],
        param_to_hook_all_reduce=tower.first.weight,
    )
    with pytest.raises(ValueError, match="delay_all_reduce_named_params"):
        GradientCache((encoder, encoder), clip_loss, 2)(torch.ones(4, WIDTH), torch.ones(4, WIDTH))


@pytest.mark.usefixtures("_one_process")
def test_an_encoder_that_the_loss_does_not_use_stops_no_later_step():
    encoders = tuple(DistributedDataParallel(Tower()) for _ in range(2))
    x, unused = torch.randn(4, WIDTH), encoders[1].module
    for loss in (lambda x, y: x.square().sum(), lambda x, y: (x * y).sum()):
        GradientCache(encoders, loss, 4)(x, x).backward()
    expected = torch.autograd.grad(
        (encoders[0].module(x) * unused(x)).sum(), list(unused.parameters())
    )
    for parameter, gradient in zip(unused.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("group", [None, "local", "world"])
def test_any_group_with_one_process(group):
    tower, x = Tower(), torch.randn(5, WIDTH)
    step = GradientCache(
        (tower, tower),
        lambda x, y: clip_loss(x, y, 3.0),
        2,
        group=dist.group.WORLD if group == "world" else group,
    )
    value = step(x, 2 * x)
    value.backward()
    torch.testing.assert_close(value, clip_loss(tower(x), tower(2 * x), 3.0))


@pytest.mark.parametrize("micro_batch_size", MICRO_BATCH_SIZES)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.__name__)
def test_two_processes_give_the_gradients_of_one(results, setup, shards, micro_batch_size):
    for rank in range(WORLD):
        case = results[rank][f"{setup.__name__} {shards} {micro_batch_size}"]
        assert case["gradient_error"] < 1e-9
        assert case["loss_error"] < 1e-9
        if SETUPS[setup] is not None:
            assert case["reductions"] == SETUPS[setup]
