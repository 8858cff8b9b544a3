"""Blocks as torch.compile makes them, in memory and in work, counted without compiling them.

Inductor traces the forward and the backward pass of a block, decides which tensors the forward pass
keeps for the backward pass (by a minimum cut: what is cheap is computed again), and fuses the
operations between products. Here the same trace and the same cut are made of fake tensors, and a
function with that memory and that work takes the place of the block's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from megabatch.models.blocks import lists_to_compile
from megabatch.planning.counter import MemoryCounter
from megabatch.planning.fused import Pass, pass_of, storages
from megabatch.torch_internals import decompositions, flattened, partition, unflattened


@dataclass(frozen=True)
class Layout:
    """A tensor without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """An uninitialised tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Graphs:
    """A block's compiled passes for inputs of certain shapes.

    Attributes:
        outputs: the tensors' layouts, and all else as it is, in the order of `structure`.
        forward, backward: the passes; without gradients there is no backward pass.
        kept_inputs, kept_outputs: indices of those that the backward pass needs.
        kept: bytes of each other tensor that it needs.
        gradients: layouts of the inputs' gradients; None for an input without one.
    """

    outputs: tuple[Any, ...]
    structure: Any
    forward: Pass
    backward: Pass | None = None
    kept_inputs: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    gradients: tuple[Layout | None, ...] = ()


@dataclass
class CompiledBlocks:
    """Counts the blocks of models as compiled ones.

    Attributes:
        failed: whether a block could not be traced; such blocks count as they are.
    """

    failed: bool = False
    _known: dict[Any, Graphs | None] = field(default_factory=dict)

    @contextmanager
    def of(self, module: nn.Module, counter: MemoryCounter) -> Iterator[None]:
        """Within this context the module's blocks are compiled."""
        lists = lists_to_compile(module).values()
        blocks = [block for members in lists for block in members]
        forwards = [(block, vars(block).get("forward")) for block in blocks]
        for block, _ in forwards:
            block.forward = self._stand_in(block, block.forward, counter)
        try:
            yield
        finally:
            for block, forward in forwards:
                del block.forward  # restores the class's method
                if forward is not None:
                    block.forward = forward

    def _stand_in(
        self, block: nn.Module, forward: Callable[..., Any], counter: MemoryCounter
    ) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = flattened((args, kwargs))
            state = {**dict(block.named_parameters()), **dict(block.named_buffers())}
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

            def original(*tensors: Tensor) -> Any:
                given = [*leaves]
                for i, tensor in zip(places, tensors[len(state) :], strict=True):
                    given[i] = tensor
                own = dict(zip(state, tensors, strict=False))
                arguments, named = unflattened(given, structure)
                block.forward = forward
                try:
                    return functional_call(block, own, arguments, named)
                finally:
                    block.forward = run

            tensors = [*state.values(), *(leaves[i] for i in places)]
            graphs = self._graphs(type(block), leaves, original, tensors, counter)
            if graphs is None:
                return forward(*args, **kwargs)
            return run_counted(graphs, counter, tensors)

        return run

    def _graphs(
        self,
        kind: type[nn.Module],
        leaves: list[Any],
        original: Callable[..., Any],
        tensors: list[Tensor],
        counter: MemoryCounter,
    ) -> Graphs | None:
        """The passes of a block, which equal blocks of a list share; None if it is not traced."""
        device = tensors[0].device.type
        key = (
            kind,
            *(torch.is_grad_enabled(), torch.is_autocast_enabled(device)),
            *(None if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves),
            *((Layout.of(t), t.requires_grad, t.device) for t in tensors),
        )
        if key not in self._known:
            try:
                with counter.paused():
                    self._known[key] = compiled_graphs(original, tensors)
            except Exception:  # of any type, depending on the block's operations
                self.failed = True
                self._known[key] = None
        return self._known[key]


def compiled_graphs(function: Callable[..., Any], tensors: list[Tensor]) -> Graphs:
    """Count the passes of a function of fake tensors that would be compiled."""
    outputs: list[Any] = []
    structure: Any = None

    def flat(*given: Tensor) -> list[Any]:
        nonlocal outputs, structure
        outputs, structure = flattened(function(*given))
        return [output for output in outputs if isinstance(output, Tensor)]

    gradients = torch.is_grad_enabled()
    # Copies: a trace is freed late, and would keep the tensors' memory.
    inputs = [
        Layout.of(t).empty(t.device).requires_grad_(gradients and t.requires_grad) for t in tensors
    ]
    forward = make_fx(flat)(*inputs)
    layouts = tuple(Layout.of(o) if isinstance(o, Tensor) else o for o in outputs)
    if not any(isinstance(o, Tensor) and o.requires_grad for o in outputs):
        return Graphs(layouts, structure, pass_of(forward.graph))
    # Without a device torch has no backward pass there; operations and dtypes are chosen by now.
    on_cpu = moved_to_cpu(forward)
    inputs = [torch.empty_like(t, device="cpu", requires_grad=t.requires_grad) for t in inputs]
    made = on_cpu(*inputs)
    wanted = [i for i, t in enumerate(inputs) if t.requires_grad]
    ends = [i for i, output in enumerate(made) if output.requires_grad]

    def joint(*given: Tensor) -> list[Any]:
        results = on_cpu(*given[: len(inputs)])
        found = torch.autograd.grad(
            [results[i] for i in ends],
            [given[i] for i in wanted],
            [*given[len(inputs) :]],
            allow_unused=True,
        )
        by_input = dict(zip(wanted, found, strict=True))
        return [*results, *(by_input.get(i) for i in range(len(inputs)))]

    tangents = [torch.empty_like(made[i]) for i in ends]
    whole = make_fx(joint, decompositions())(*inputs, *tangents)
    static = [i for i, t in enumerate(tensors) if isinstance(t, nn.Parameter) or t.is_leaf]
    first, second = partitioned(whole, len(inputs), len(made), static)
    return _graphs_of(first, second, len(inputs), layouts, structure)


def partitioned(
    joint: fx.GraphModule, inputs: int, outputs: int, static: list[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Divide a trace of both passes as torch.compile does.

    Args:
        joint: takes the inputs and the outputs' gradients, and returns outputs and the inputs'
            gradients.
        inputs, outputs: their numbers.
        static: indices of the inputs that stay where they are, as parameters do.

    Returns:
        the passes; the first one returns the outputs and what the second one needs of it.
    """
    given = [node for node in joint.graph.nodes if node.op == "placeholder"]
    for i, node in enumerate(given):  # the names by which the partitioner tells them apart
        name = f"primals_{i + 1}" if i < inputs else f"tangents_{i - inputs + 1}"
        node.name = node.target = name
    joint.recompile()
    return partition(joint, None, num_fwd_outputs=outputs, static_lifetime_input_indices=static)


def moved_to_cpu(module: fx.GraphModule) -> fx.GraphModule:
    """The same operations for tensors on the CPU."""
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("cpu"))
    for name, constant in list(vars(module).items()):
        if isinstance(constant, Tensor):
            setattr(module, name, torch.empty_like(constant, device="cpu"))
    module.recompile()
    return module


def _graphs_of(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    inputs: int,
    layouts: tuple[Any, ...],
    structure: Any,
) -> Graphs:
    """The counts of two graphs, the first of which returns the outputs and what is kept."""
    (results,) = next(n for n in forward.graph.nodes if n.op == "output").args
    (gradients,) = next(n for n in backward.graph.nodes if n.op == "output").args
    tensors = sum(isinstance(layout, Layout) for layout in layouts)
    given = [n for n in forward.graph.nodes if n.op == "placeholder"][:inputs]
    of_inputs = {key: i for i, node in enumerate(given) for key in storages(node)}
    of_outputs = {key: i for i, node in enumerate(results[:tensors]) for key in storages(node)}
    kept: dict[int, int] = {}
    for node in results[tensors:]:
        kept |= storages(node)
    return Graphs(
        layouts,
        structure,
        pass_of(forward.graph),
        pass_of(backward.graph),
        tuple({of_inputs[key] for key in kept if key in of_inputs}),
        tuple({of_outputs[key] for key in kept if key in of_outputs}),
        tuple(size for key, size in kept.items() if key not in of_inputs | of_outputs),
        tuple(None if node is None else Layout.of(node.meta["val"]) for node in gradients[:inputs]),
    )


def run_counted(graphs: Graphs, counter: MemoryCounter, tensors: list[Tensor]) -> Any:
    """Outputs of a block on fake tensors, with the memory and the work of its passes."""
    made = iter(_Counted.apply(graphs, counter, *tensors))
    outputs = [next(made) if isinstance(o, Layout) else o for o in graphs.outputs]
    return unflattened(outputs, graphs.structure)


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graphs: Graphs, counter: MemoryCounter, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        device = tensors[0].device
        _count(graphs.forward, counter, device)
        with counter.without_work():
            outputs = tuple(o.empty(device) for o in graphs.outputs if isinstance(o, Layout))
            if graphs.backward is not None:
                needed = [tensors[i] for i in graphs.kept_inputs]
                ctx.save_for_backward(*needed, *(outputs[i] for i in graphs.kept_outputs))
                ctx.kept = [torch.empty(n, dtype=torch.uint8, device=device) for n in graphs.kept]
        ctx.graphs, ctx.counter, ctx.device = graphs, counter, device
        return outputs

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        graphs: Graphs = ctx.graphs
        assert graphs.backward is not None
        _count(graphs.backward, ctx.counter, ctx.device)
        ctx.kept = None
        gradients = (g if g is None else g.empty(ctx.device) for g in graphs.gradients)
        return None, None, *gradients


def _count(passed: Pass, counter: MemoryCounter, device: torch.device) -> None:
    """Count a pass's work, and its peak for a moment."""
    counter.work += passed.work
    torch.empty(max(0, passed.extra), dtype=torch.uint8, device=device)
