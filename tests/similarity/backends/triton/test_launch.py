"""A launch with known kinds of arguments is that of the compiled kernel itself."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

import megabatch as mb
from megabatch.similarity.backends.triton import launch as module
from megabatch.similarity.backends.triton.launch import kinds, launch

WIDE = torch.zeros(8, 64, dtype=torch.float16)


class Kernel:
    """Notes how it is launched: by Triton ("bound"), or itself compiled."""

    arg_names = ("x", "n", "B", "FLAG")

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def bound(*arguments: Any, **constants: Any) -> Compiled:
            self.launches.append(("bound", grid, arguments, constants))
            return Compiled(self)

        return bound


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.kernel.launches.append(("itself", grid, arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(module, "JITFunction", Kernel)
    monkeypatch.setattr(module, "past_binding", True)
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def test_the_second_launch_is_of_the_compiled_kernel(kernel: Kernel) -> None:
    launch(kernel, 7, WIDE, 32, FLAG=True, B=128, num_warps=4)
    launch(kernel, 9, WIDE[2:], 48, FLAG=True, B=128, num_warps=4)
    first, second = kernel.launches
    assert first[:2] == ("bound", (7,))
    assert first[3] == {"FLAG": True, "B": 128, "num_warps": 4}
    assert second[:2] == ("itself", (9, 1, 1))
    assert second[2][0].data_ptr() == WIDE[2:].data_ptr()
    assert second[2][1:] == (48, 128, True)  # constants in the signature's order, no options


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((WIDE.float(), 32), {}),
        ((WIDE[:, 1:], 32), {}),  # not at a multiple of 16 bytes
        ((WIDE, 33), {}),
        ((WIDE, 1), {}),
        ((WIDE, 1 << 40), {}),
        ((WIDE, None), {}),
        ((None, 32), {}),
        ((TensorDescriptor.from_tensor(WIDE, [4, 64]), 32), {}),
        ((WIDE, 32), {"B": 64}),
        ((WIDE, 32), {"num_warps": 8}),
    ],
)
def test_what_needs_another_kernel_goes_through_triton(
    kernel: Kernel, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    usual = {"B": 128, "FLAG": True, "num_warps": 4}
    launch(kernel, 1, WIDE, 32, **usual)
    launch(kernel, 1, *arguments, **(usual | constants))
    launch(kernel, 1, *arguments, **(usual | constants))
    assert [how for how, *_ in kernel.launches] == ["bound", "bound", "itself"]


def test_descriptors_of_other_tiles_need_another_kernel(kernel: Kernel) -> None:
    for width in (64, 32, 64):
        box = TensorDescriptor.from_tensor(WIDE, [4, width])
        launch(kernel, 1, box, 32, B=128, FLAG=True)
    assert [how for how, *_ in kernel.launches] == ["bound", "bound", "itself"]


def test_every_device_has_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launch(kernel, 1, WIDE, 32, B=128, FLAG=True)
    assert [how for how, *_ in kernel.launches] == ["bound", "bound", "itself"]


def test_other_versions_of_triton_go_the_ordinary_way(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "past_binding", False)
    for _ in range(3):
        launch(kernel, 1, WIDE, 32, B=128, FLAG=True)
    assert [how for how, *_ in kernel.launches] == ["bound"] * 3


def test_the_versions_that_were_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, expected in (("3.6.0", True), ("3.6.1+git0", True), ("3.60.0", False)):
        monkeypatch.setattr(triton, "__version__", version)
        assert runpy.run_path(module.__file__)["past_binding"] is expected


@pytest.mark.parametrize("name", module.PURPOSES)
def test_undocumented_names_of_triton(name: str) -> None:
    """A Triton that fails here cannot join `TESTED`; the rest of a launch only a GPU can show."""
    purpose = f"triton.{name}, which megabatch needs {module.PURPOSES[name]}"
    if name.endswith("arg_names"):  # of an instance
        assert getattr(JITFunction(example), "arg_names", None) == ["a", "b"], purpose
        return
    try:
        found = reduce(getattr, name.split("."), triton)
    except AttributeError:
        pytest.fail(f"this Triton has no {purpose}")
    if name.endswith("run"):
        body = inspect.getsource(found).rstrip()
        assert body.endswith("return kernel"), purpose
    if name.endswith("__getitem__"):
        assert list(inspect.signature(found).parameters) == ["self", "grid"], purpose
        assert re.search(r"def runner\(\*args, stream=None\)", inspect.getsource(found)), purpose


@pytest.mark.gpu
def test_both_ways_give_the_same_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any version of Triton: see `TESTED`."""
    found = []
    for past_binding in (False, True):
        monkeypatch.setattr(module, "past_binding", past_binding)
        monkeypatch.setattr(module, "_known", {})
        for rows in (1000, 999, 1000, 1024):  # launches of other kinds, and known ones
            torch.manual_seed(rows)
            x, y = (torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            mine = x.requires_grad_(), y.requires_grad_()
            loss = mb.ClipLoss()(*mine, 2.0) + mb.SigLipLoss()(*mine, 2.0, -3.0)
            found.append([loss, *torch.autograd.grad(loss, mine)])
        assert bool(module._known) is past_binding
    for ordinary, itself in zip(found[:4], found[4:], strict=True):
        for a, b in zip(ordinary, itself, strict=True):
            assert torch.equal(a, b)


def example(a, b):  # type: ignore[no-untyped-def]
    pass


_made = JITFunction(example)
_bound = create_function_from_signature(
    _made.signature, _made.params, make_backend(GPUTarget("cuda", 90, 32))
)
numbers = st.one_of(
    st.integers(-(2**40), 2**40), st.integers(-40, 40), st.integers(0, 99).map(lambda n: 16 * n)
)
tensors = st.builds(
    lambda offset, dtype: torch.zeros(64, dtype=dtype)[offset:],
    st.integers(0, 20),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)


def near(argument: Any, data: st.DataObject) -> Any:
    """One that may well be of the same kind."""
    if isinstance(argument, int):
        return argument + data.draw(st.sampled_from([0, 1, 15, 16, -32, 2**31, -(2**31)]))
    if isinstance(argument, torch.Tensor):
        return argument[data.draw(st.integers(0, 9)) :]
    return argument


@settings(deadline=None)
@given(st.tuples(*2 * [st.one_of(numbers, tensors, st.none(), st.booleans())]), st.data())
def test_kinds_tell_apart_all_that_triton_does(one: tuple[Any, ...], data: st.DataObject) -> None:
    other = tuple(near(argument, data) for argument in one)
    if kinds(one) == kinds(other):
        assert _bound(*one)[1] == _bound(*other)[1]


def test_kinds_do_not_tell_all_numbers_apart() -> None:
    assert kinds((100, 160, 0, WIDE, None)) == kinds((101, 320, 0, WIDE[1:], None))
