"""The figures of the GPU at hand, from a short measurement (`megabatch plan --probe`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megabatch.models import Towers
from megabatch.models.blocks import blocks
from megabatch.planning.compiled import compiled_graphs
from megabatch.planning.counter import counted, fake_copies
from megabatch.planning.seconds import work_seconds
from megabatch.planning.simulation.hardware import Encoding, Gpu
from megabatch.planning.towers import AUTOCAST, Sample
from megabatch.planning.work import Work
from megabatch.torch_internals import flattened, unflattened


@dataclass(frozen=True)
class Probe:
    """Measures a device.

    Attributes:
        device: to measure.
        seconds: for which each measurement is repeated, at least: a GPU that was idle is faster
            until it is at its power limit.
        side: of the square matrices that are multiplied.
        nbytes: that are copied within the device's memory.
    """

    device: torch.device
    seconds: float = 2.0
    side: int = 8192
    nbytes: int = 1 << 30

    def figures(
        self, towers: Towers, sample: Sample, size: int, precision: str, *, compiled: bool
    ) -> tuple[Gpu, Encoding]:
        """The device's rates, and the share of them that a block of each of the towers reaches.

        Args:
            towers: the model, which is moved to the device.
            sample: a pair. size: pairs of a micro-batch.
            precision: of the run.
            compiled: whether blocks are compiled.
        """
        kind = self.device.type
        dtype = AUTOCAST.get(precision, torch.float32)
        product, memory = self._product_rate(dtype), self._memory_rate()
        gpu, base = replace(Gpu(), product_rate=product, memory_rate=memory), Encoding()
        taken, work = 0.0, Work()
        with torch.autocast(kind, dtype, enabled=precision in AUTOCAST):
            for block, args, kwargs in self._inputs(towers.module.to(self.device), sample, size):
                taken += self._time(both_passes(block, args, kwargs, compiled=compiled))
                work += counted_passes(block, args, kwargs, compiled=compiled)
        # All other time is taken to be as on an H200.
        rest = work_seconds(replace(work, flops=0), gpu, base, compiled=compiled)
        products = work.flops / product / max(taken - rest, taken / 10)
        return gpu, replace(base, products=min(1.0, products))

    def _product_rate(self, dtype: torch.dtype) -> float:
        x = torch.randn(self.side, self.side, device=self.device, dtype=dtype)
        return 2 * self.side**3 / self._time(lambda: x @ x)

    def _memory_rate(self) -> float:
        source = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * self.nbytes / self._time(lambda: target.copy_(source))

    def _inputs(
        self, module: nn.Module, sample: Sample, size: int
    ) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
        """The first block of each kind with its inputs."""
        found: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        shapes = set()

        def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [*block.parameters(), *(a for a in args if isinstance(a, Tensor))]
            shape = (type(block), *(tuple(tensor.shape) for tensor in tensors))
            if shape not in shapes:
                shapes.add(shape)
                found.append((block, args, kwargs))

        hooks = [b.register_forward_pre_hook(note, with_kwargs=True) for b in blocks(module)]
        try:
            with torch.no_grad():
                module(*(tensor.fill_(1) for tensor in sample.empty(size, self.device)))
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _time(self, call: Callable[[], object]) -> float:
        """Seconds of a call, after two to warm up."""
        call()
        call()
        self._wait()
        begun, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - begun) < self.seconds or not count:
            call()
            count += 1
            self._wait()
        return passed / count if count > 1 else time.perf_counter() - begun

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def both_passes(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, compiled: bool
) -> Callable[[], None]:
    """A function that runs a block's forward and backward pass."""
    forward: Callable[..., Any] = torch.compile(block) if compiled else block
    given = _with_gradients(args)

    def call() -> None:
        block.zero_grad()
        outputs = _trained(forward(*given, **kwargs))
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    return call


def counted_passes(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, compiled: bool
) -> Work:
    """The work of a block's forward and backward pass, counted on fake tensors."""
    with counted() as counter:
        place = next(block.parameters()).device
        weights = fake_copies(block, place)
        leaves, structure = flattened((_with_gradients(args), kwargs))
        leaves = [
            torch.empty(
                leaf.shape, dtype=leaf.dtype, device=place, requires_grad=leaf.requires_grad
            )
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def call(*tensors: Tensor) -> Any:
            own = dict(zip(weights, tensors, strict=False))
            given = [*leaves]
            for i, tensor in zip(places, tensors[len(weights) :], strict=True):
                given[i] = tensor
            arguments, named = unflattened(given, structure)
            return functional_call(block, own, arguments, named)

        tensors = [*weights.values(), *(leaves[i] for i in places)]
        if compiled:
            graphs = compiled_graphs(call, tensors)
            assert graphs.backward is not None
            return graphs.forward.work + graphs.backward.work
        counter.work = Work()
        outputs = _trained(call(*tensors))
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return counter.work


def _with_gradients(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, the first features among which get a gradient, as inside a tower.

    A whole tower, of a model without blocks, takes pixels or tokens, which have none.
    """
    floats = (i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point())
    first = next(floats, None)
    return tuple(a.detach().requires_grad_() if i == first else a for i, a in enumerate(args))


def _trained(outputs: Any) -> list[Tensor]:
    leaves, _ = flattened(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
