"""Launching a kernel, without what Triton would work out anew each time.

`kernel[grid](...)` binds, classifies and hashes up to 45 arguments in Python, which a small batch
waits for. What it finds depends on the constants and on each argument's kind alone: with these
known, the compiled kernel is launched itself, as Triton's tutorial on a fused softmax does.

That takes what Triton does not document (`PURPOSES`): all that megabatch knows of it is in this
file, and serves with the versions it was tested with.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

#: By undocumented name of Triton, what it is for.
PURPOSES = {
    "runtime.jit.JITFunction": "to tell a kernel that is compiled from one that is interpreted",
    "runtime.jit.JITFunction.arg_names": "to give constants in the order of a kernel's signature",
    "runtime.jit.JITFunction.run": "to get the compiled kernel that a launch used",
    "compiler.CompiledKernel.__getitem__": "to launch a compiled kernel past the binding of its "
    "arguments: with a grid of three, on the current stream, with all arguments and constants",
}
#: Versions whose compiled kernels were launched themselves on a GPU. Another one joins once
#: `pytest -m gpu tests/similarity/backends/triton/test_launch.py` passed with it, which tries it
#: with any version; until then launches go the ordinary way: tens of microseconds more each.
TESTED = ("3.6",)

#: Whether compiled kernels are launched themselves.
past_binding = ".".join(triton.__version__.split(".")[:2]) in TESTED

_known: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """`kernel[(programs,)](*arguments, **constants)` on the current device.

    Args:
        arguments: those that are no `tl.constexpr`, which come first in the kernel's signature.
        constants: the others, and the launch's options.
    """
    if not (past_binding and isinstance(kernel, JITFunction)):  # or Triton's interpreter runs it
        kernel[(programs,)](*arguments, **constants)
        return
    key = (id(kernel), torch.cuda.current_device(), tuple(constants.items()), *kinds(arguments))
    known = _known.get(key)
    if known is None:
        compiled = kernel[(programs,)](*arguments, **constants)
        _known[key] = compiled, [constants[name] for name in kernel.arg_names[len(arguments) :]]
    else:
        compiled, rest = known
        compiled[(programs, 1, 1)](*arguments, *rest)


def kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """What Triton compiles a kernel anew for: dtypes, and numbers and addresses in steps of 16.

    Numbers are told apart a little more than that, also where a kernel does not specialise them:
    it costs entries, of which a few dozen remain.
    """
    found: list[Any] = []
    for a in arguments:
        if type(a) is int:
            found.append(a if 0 <= a < 16 else (a.bit_length() > 31, a % 16 == 0))
        elif isinstance(a, Tensor):
            found.append(a.dtype if a.data_ptr() % 16 == 0 else (a.dtype,))
        elif isinstance(a, TensorDescriptor):
            found.append((a.base.dtype, *a.block_shape))
        else:
            found.append(type(a))
    return found
