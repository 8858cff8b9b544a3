"""Kernels whose launches name every argument and cost the host little.

`kernel` turns a function into a Triton kernel with a method `launch`, which takes all arguments by
keyword. Only the kernel's signature orders them.

Triton's own launch, `jitted[grid](...)`, binds, classifies and hashes all arguments in Python: tens
of microseconds, which a small batch waits for. The outcome depends only on the constants and on the
kind of each argument. The first launch with the same constants and kinds goes through Triton; later
ones call the compiled kernel directly, as Triton's tutorial on a fused softmax does.

Direct launches need undocumented parts of Triton (`PURPOSES`). Only this file knows of them, and it
uses them only with the versions of Triton that they were tested with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

#: Undocumented names of Triton, and what each is for.
PURPOSES = {
    "runtime.jit.JITFunction": "to tell a compiled kernel from an interpreted one",
    "runtime.jit.JITFunction.run": "to get the compiled kernel that a launch used",
    "compiler.CompiledKernel.run": "to launch a compiled kernel without binding its arguments, "
    "as JITFunction.run does, with no hooks of Triton's own profiler",
    "runtime.driver": "to get the current stream, as JITFunction.run does",
}
#: Versions whose compiled kernels have been launched directly on a GPU. To add one, run
#: `pytest -m gpu tests/similarity/triton` with it, on a Hopper GPU too: `hopper` is for these
#: versions alone. With other versions all launches go through Triton.
TESTED = ("3.6",)

#: Arguments that no kernel is specialised to, by name: numbers that change from block to block.
#: Triton would compile a kernel again, for seconds, whenever one becomes 1 or a multiple of 16.
VARYING = (
    "diagonal_offset", "m", "n", "size", "tiles",
    "row_start", "row_stride", "row_range_stride", "row_state_stride", "row_extremes_stride",
    "row_is_first", "row_is_last", "row_partials",
    "col_start", "col_stride", "col_range_stride", "col_state_stride", "col_extremes_stride",
    "col_is_first", "col_is_last", "col_partials", "col_tiles", "first_col_tile",
    "gradient_stride", "result_stride", "stride",
)  # fmt: skip

#: Whether compiled kernels are launched directly.
past_binding = ".".join(triton.__version__.split(".")[:2]) in TESTED


class Kernel:
    """A Triton kernel.

    Attributes:
        jitted: the kernel as `triton.jit` makes it.
        launch: `launch(programs, *, <arguments>, <constants>, num_warps=4, num_stages=3)` runs that
            many programs on the current device. The constants are the parameters that are
            `tl.constexpr`, the arguments all others; every one is required, by keyword. With
            `shared`, `launch(programs, block, *, ...)` takes the parameters of these names, lower
            case for constants, from the attributes of `block` instead.
    """

    def __init__(
        self,
        function: Callable[..., None],
        shared: Sequence[str] = (),
        jit: Callable[..., Any] = triton.jit,
    ) -> None:
        self.jitted: Any = jit(do_not_specialize=VARYING)(function)
        self.launch: Callable[..., None] = _launch_by_name(function, shared, self._launch)
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def _launch(self, programs: int, arguments: tuple[Any, ...], *rest: Any) -> None:
        """Launch with arguments in the signature's order; `rest` as `_bind` takes it."""
        if not (past_binding and isinstance(self.jitted, JITFunction)):  # or it is interpreted
            self._bind(programs, arguments, *rest)
            return
        device = torch.cuda.current_device()
        key = device, rest, kinds(arguments)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._bind(programs, arguments, *rest)
            return
        stream, hooks = driver.active.get_current_stream(device), (None, None, None)
        of_kernel = compiled.function, compiled.packed_metadata
        compiled.run(programs, 1, 1, stream, *of_kernel, *hooks, *arguments, *rest[0])

    def _bind(
        self,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
    ) -> Any:
        """Launch through Triton; return the compiled kernel."""
        return self.jitted[(programs,)](
            *arguments, *constants, num_warps=num_warps, num_stages=num_stages
        )


def kernel(function: Callable[..., None]) -> Kernel:
    """`triton.jit` for a kernel that is launched; functions that kernels call take `triton.jit`."""
    return Kernel(function)


def _launch_by_name(
    function: Callable[..., None], shared: Sequence[str], launch: Callable[..., None]
) -> Callable[..., None]:
    """`launch`, taking the parameters of `function` by keyword or from a block.

    Generated source, as for a namedtuple: Python matches the keywords of a plain function without a
    dict and without hashing, in 1.5 us for 40 of them, and reads as many attributes in 0.5 us.
    """
    parameters = inspect.signature(function).parameters.values()
    constant = ["constexpr" in str(p.annotation) for p in parameters]
    if constant != sorted(constant):
        raise TypeError(f"{function.__name__}: its tl.constexpr must come last")
    of_block = {p.name: p.name.lower() in shared for p in parameters}
    values = [f"block.{n.lower()}, " if of_block[n] else f"{n}, " for n in of_block]
    arguments, constants = (
        "".join(v for v, c in zip(values, constant, strict=True) if c == wanted)
        for wanted in (False, True)
    )
    keywords = "".join(f"{name}, " for name in of_block if not of_block[name])
    source = (
        f"lambda programs, {'block, ' * bool(shared)}*, {keywords}num_warps=4, num_stages=3: "
        f"launch(programs, ({arguments}), ({constants}), num_warps, num_stages)"
    )
    made: Callable[..., None] = eval(source, {"launch": launch})
    made.__qualname__ = f"{function.__name__}.launch"
    return made


def kinds(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The kind of each argument: launches with the same kinds share a compiled kernel.

    Triton specialises a kernel to dtypes, to addresses that divide by 16 and to numbers that are 1
    or divide by 16. Kinds distinguish a few more numbers, also those that no kernel is specialised
    to: that costs a few dozen entries in all.
    """
    found: list[Any] = []
    for a in arguments:
        kind = type(a)
        if kind is int:
            if 0 <= a < 16:
                found.append(a)
            else:  # 16 to 19: int32 or int64, a multiple of 16 or not
                found.append((16 if a.bit_length() < 32 else 18) + (a % 16 == 0))
        elif a is None:
            found.append(None)
        elif kind is Tensor or isinstance(a, Tensor):
            found.append(a.dtype if a.data_ptr() % 16 == 0 else (a.dtype,))
        elif kind is TensorDescriptor:
            found.append((a.base.dtype, *a.block_shape))
        else:
            found.append(kind)
    return tuple(found)
