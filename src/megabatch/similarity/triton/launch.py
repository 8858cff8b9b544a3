"""Kernels whose launches name every argument and cost the host little.

`kernel` turns a function into a Triton kernel with a method `launch`, which takes all arguments by
keyword. Only the kernel's signature orders them.

Triton's own launch, `jitted[grid](...)`, binds, classifies and hashes all arguments in Python: tens
of microseconds, which a small batch waits for. The outcome depends only on the constants and on the
kind of each argument. The first launch with the same constants and kinds goes through Triton; later
ones call the compiled kernel's launcher in C. It takes addresses in place of tensors, with no call
of the driver for each, and descriptors that are encoded once for each place in memory.

Direct launches need undocumented parts of Triton (`PURPOSES`). Only this file knows of them, and it
uses them only with the versions of Triton that they were tested with.
"""

from __future__ import annotations

import functools
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
    "backends.nvidia.driver.CudaLauncher": "what `run` is: to call its launcher in C",
    "backends.nvidia.driver.wrap_handle_tensordesc": "to find that launcher in its closure",
    "backends.nvidia.driver.make_tensordesc_arg": "to encode a descriptor as that closure does",
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
#: Places in memory whose descriptors a compiled kernel keeps.
ENCODED = 64

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
        self._launchers: dict[tuple[Any, ...], Launcher] = {}

    def _launch(self, programs: int, arguments: tuple[Any, ...], *rest: Any) -> None:
        """Launch with arguments in the signature's order; `rest` as `_bind` takes it."""
        if not (past_binding and isinstance(self.jitted, JITFunction)):  # or it is interpreted
            self._bind(programs, arguments, *rest)
            return
        device, (kinds, values) = torch.cuda.current_device(), flattened(arguments)
        key = device, rest, kinds
        launcher = self._launchers.get(key)
        if launcher is None:
            compiled = self._bind(programs, arguments, *rest)
            run = compiled.run
            if not (run.global_scratch_size or run.profile_scratch_size):  # which Triton allocates
                self._launchers[key] = Launcher(compiled, arguments)
        else:
            launcher.launch(programs, device, values, rest[0])

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
            *map(self.descriptor, arguments), *constants,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip

    @staticmethod
    def descriptor(a: Any) -> Any:
        """Triton's descriptor for one of ours; other arguments as they are."""
        return a.made(TensorDescriptor) if type(a) is Descriptor else a


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


class Descriptor:
    """A matrix, of which a kernel takes a tile at a time by the GPU's copy engine (TMA).

    Triton's own checks its fields whenever one is made, and is encoded at each launch.
    """

    __slots__ = ("base", "block_shape", "kind", "place")

    def __init__(self, base: Tensor, block_shape: list[int]) -> None:
        self.base, self.block_shape = base, block_shape
        self.kind = base.dtype, *block_shape  #: see `flattened`
        self.place = base.data_ptr(), base.shape, base.stride()

    def made(self, kind: Callable[..., Any], *options: Any) -> Any:
        """The same as a descriptor of another class."""
        shape, strides = list(self.base.shape), list(self.base.stride())
        return kind(self.base, shape, strides, self.block_shape, *options)


def flattened(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
    """The kind of each argument, and the arguments with addresses in place of tensors.

    Launches with the same kinds share a compiled kernel. Triton specialises it to dtypes, to
    addresses that divide by 16 and to numbers that are 1 or divide by 16. Kinds distinguish a few
    more numbers, also those that no kernel is specialised to: a few dozen entries in all.
    """
    kinds: list[Any] = []
    values = list(arguments)
    for i, a in enumerate(values):
        kind = type(a)
        if kind is int:
            kinds.append(_kind_of_number(a))
        elif a is None:
            kinds.append(None)
        elif kind is Tensor or isinstance(a, Tensor):
            values[i] = address = a.data_ptr()
            kinds.append((a.dtype,) if address % 16 else a.dtype)
        elif kind is Descriptor:
            kinds.append(a.kind)
        else:
            kinds.append(kind)
    return tuple(kinds), values


@functools.lru_cache(4096)  # a step has the same few numbers again and again
def _kind_of_number(a: int) -> int:
    if 0 <= a < 16:
        return a
    # 16 to 19: int32 or int64, a multiple of 16 or not
    return (16 if a.bit_length() < 32 else 18) + (a % 16 == 0)


class Launcher:
    """The launcher in C of a compiled kernel, without hooks of Triton's own profiler."""

    def __init__(self, compiled: Any, arguments: tuple[Any, ...]) -> None:
        run, encodings = compiled.run, []
        self._launch = run.launch
        if inspect.isfunction(run.launch):  # which encodes the descriptors among the arguments
            inside = inspect.getclosurevars(run.launch).nonlocals
            self._launch, encodings = inside["launcher"], inside["tensordesc_meta"]
        self._current_stream = driver.active.get_current_stream
        self._options = (
            compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        )  # fmt: skip
        places = [i for i, a in enumerate(arguments) if type(a) is Descriptor]
        # From the last one on, as each becomes several values.
        self._encodings = list(zip(places, encodings, strict=True))[::-1]
        self._encoded: dict[tuple[Any, ...], list[Any]] = {}

    def launch(self, programs: int, device: int, values: list[Any], constants: Any) -> None:
        """Launch with the values of `flattened`, which are changed."""
        for i, encoding in self._encodings:
            key = i, values[i].place
            encoded = self._encoded.get(key)
            if encoded is None:
                from triton.backends.nvidia.driver import make_tensordesc_arg

                if len(self._encoded) >= ENCODED:
                    self._encoded.clear()
                made = make_tensordesc_arg(values[i].made(TensorDescriptor), encoding)
                # On a GPU without TMA the matrix itself comes first.
                self._encoded[key] = encoded = flattened(tuple(made))[1]
            values[i : i + 1] = encoded
        stream = self._current_stream(device)
        self._launch(programs, 1, 1, stream, *self._options, *values, *constants)
