"""A model, its batches and comparisons, for tests under DDP and FSDP."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch.gradient_cache import GradientCache
from megabatch.losses import ClipLoss
from megabatch.torch_internals import fsdp_groups

WIDTH, DIMS = 5, 4
MICRO_BATCH_SIZES = (2, 8)  # 8: every shard is one micro-batch
#: Micro-batch sizes and numbers of kept micro-batches.
KEPT = ((2, 0), (8, 0), (2, 1))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, DIMS)

    def forward(self, x):
        hidden = self.first(x).tanh().reshape(len(x), 6, -1).mean(2)  # impossible without rows
        return F.normalize(self.second(hidden), dim=-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(), Tower()
        self.scale = nn.Parameter(torch.tensor([1.1]))  # FSDP2 takes no 0-d parameter

    def forward(self, images, texts):
        return self.image(images), self.text(texts), self.scale.exp()


class TrainingStep(nn.Module):
    """Like Lightning, whose wrapped module computes the loss."""

    def __init__(self, model, size, kept=0):
        super().__init__()
        self.model = model
        self.step = GradientCache(model, ClipLoss(), size, kept_micro_batches=kept)

    def forward(self, *batches):
        return self.step(*batches)


class Gather(torch.autograd.Function):
    """The rows of all ranks; the backward pass sums over ranks, as the losses' convention asks."""

    @staticmethod
    def forward(ctx, x, sizes):
        ctx.rows = slice(sum(sizes[: dist.get_rank()]), sum(sizes[: dist.get_rank() + 1]))
        padded = [x.new_zeros(max(sizes), x.shape[1]) for _ in sizes]
        dist.all_gather(padded, F.pad(x, (0, 0, 0, max(sizes) - len(x))))
        return torch.cat([part[:size] for part, size in zip(padded, sizes, strict=True)])

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total[ctx.rows], None


def new_model():
    """A model with the same weights at each call and on each rank."""
    torch.manual_seed(0)
    return Model().double()


def batches_of(rank, sizes, seed=1):
    """A rank's shards of two batches, and both whole batches."""
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(sum(sizes), WIDTH, generator=generator).double() for _ in range(2)]
    return [batch.split(sizes)[rank] for batch in whole], whole


#: Shards of two ranks: equal, unequal and empty ones.
SHARDS = ([4, 4], [5, 1], [0, 5])


def under_ddp(model):
    return DistributedDataParallel(model)


def sharded(module, **options):
    device = next(module.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return fully_shard(module, mesh=mesh, **options)


def under_fsdp(model, **options):
    for part in (model.image, model.text, model):
        sharded(part, **options)
    return model


def count_reductions(wrapped, counts):
    """Append to `counts` at each reduction of a bucket of a DDP module."""

    def hook(_, bucket):
        counts.append(1)
        return allreduce_hook(None, bucket)

    wrapped.register_comm_hook(None, hook)


def synchronised(model):
    """The sync settings of FSDP2 and DDP."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            yield module.require_backward_grad_sync
        elif isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                yield group.reduce_grads, group.all_reduce_grads


def on_one_process(wholes, factors=(1.0,)):
    """The sum of factors * loss over whole batches on one process, and its gradients by name."""
    model = new_model()
    losses = [ClipLoss(group="local")(*model(*whole)) for whole in wholes]
    loss = sum(factor * loss for factor, loss in zip(factors, losses, strict=True))
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model):
    """The gradient of each parameter, whole, by its name in the model that was wrapped."""
    found = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        found[name.replace("module.", "").replace("model.", "")] = gradient
    return found


def assert_same(model, expected, case=None):
    """The model has these gradients, by name; `case`: for messages."""
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        if gradient is None or expected[name] is None:  # of a frozen parameter
            assert gradient is expected[name]
        else:
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-9, msg=case)
