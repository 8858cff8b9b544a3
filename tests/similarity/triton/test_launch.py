"""Kernels take their arguments by name; known kinds of arguments go to the compiled kernel."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Callable
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

import megabatch as mb
from megabatch.similarity.triton import launch as module
from megabatch.similarity.triton import paired, sigmoid, softmax, tiles
from megabatch.similarity.triton.blocks import Block
from megabatch.similarity.triton.launch import VARYING, Descriptor, Kernel, flattened, kernel

WIDE = torch.zeros(8, 64, dtype=torch.float16)


def example(x, y, n, row_start, B: tl.constexpr, FLAG: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


class Jitted:
    """Record each launch: through Triton ("bound"), or directly."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def bound(*arguments: Any, **options: Any) -> Compiled:
            self.launches.append(("bound", grid, arguments, options))
            return Compiled(self, sum(type(a) is TensorDescriptor for a in arguments))

        return bound


class Compiled:
    """As of Triton 3.6: what `run` is launches in C, around it a closure encodes descriptors."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, jitted: Jitted, descriptors: int) -> None:
        def directly(x: int, y: int, z: int, *given: Any) -> None:
            options = "stream", "function", False, False, None, None, "metadata", None, None, None
            assert given[:10] == options
            jitted.launches.append(("directly", (x, y, z), given[10:]))

        launcher, tensordesc_meta = partial(directly), ["encoding"] * descriptors

        def wrapped(*arguments: Any) -> None:
            launcher(*arguments, tensordesc_meta)

        self.run = SimpleNamespace(
            launch=wrapped if descriptors else launcher, global_scratch_size=0,
            profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=False,
        )  # fmt: skip


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(module, "JITFunction", Jitted)
    monkeypatch.setattr(module, "past_binding", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    active = SimpleNamespace(get_current_stream=lambda device: "stream")
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    found = kernel(example)
    found.jitted = Jitted()
    return found


USUAL = {"x": WIDE, "y": None, "n": 32, "row_start": 0, "B": 128, "FLAG": True}


def how_launched(made: Kernel) -> list[str]:
    return [how for how, *_ in made.jitted.launches]


def test_the_second_launch_is_of_the_compiled_kernel(made: Kernel) -> None:
    made.launch(7, **USUAL, num_warps=8)
    others = USUAL | {"x": WIDE[2:], "n": 48}
    made.launch(9, **{name: others[name] for name in reversed(others)}, num_warps=8)
    first, second = made.jitted.launches
    assert first == ("bound", (7,), tuple(USUAL.values()), {"num_warps": 8, "num_stages": 3})
    assert second[:2] == ("directly", (9, 1, 1))
    assert second[2] == (WIDE[2:].data_ptr(), None, 48, 0, 128, True)


def test_descriptors_are_encoded_once_for_a_place(
    made: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    def encode(a: TensorDescriptor, encoding: str) -> list[Any]:
        assert encoding == "encoding"
        encoded.append(a.base.data_ptr())
        return [f"map {len(encoded)}", *a.shape, *a.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    monkeypatch.setattr(module, "ENCODED", 2)
    places = [WIDE, WIDE[2:], WIDE, WIDE[2:], WIDE[4:], WIDE]
    for x in (WIDE, *places):
        made.launch(1, **USUAL | {"x": Descriptor(x, [4, 64])})
    assert made.jitted.launches[0][2][0].block_shape == [4, 64]  # Triton's own
    expected = [(1, WIDE), (2, WIDE[2:]), (1, WIDE), (2, WIDE[2:]), (3, WIDE[4:]), (4, WIDE)]
    for (*_, values), (k, x) in zip(made.jitted.launches[1:], expected, strict=True):
        assert values == (f"map {k}", *x.shape, 64, 1, None, 32, 0, 128, True)
    assert encoded == [x.data_ptr() for x in (WIDE, WIDE[2:], WIDE[4:], WIDE)]


def test_a_kernel_that_needs_memory_goes_through_triton(
    made: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = made._bind

    def needing(*given: Any) -> Any:
        compiled = bind(*given)
        compiled.run.profile_scratch_size = 8
        return compiled

    monkeypatch.setattr(made, "_bind", needing)
    for _ in range(2):
        made.launch(1, **USUAL)
    assert how_launched(made) == ["bound", "bound"]


def test_a_block_gives_the_arguments_that_are_named_as_its_attributes(made: Kernel) -> None:
    shared = Kernel(example, ("y", "n", "row_start", "flag", "other"))
    shared.jitted = made.jitted
    block = SimpleNamespace(y=None, n=32, row_start=0, flag=True, other=5)
    shared.launch(3, block, x=WIDE, B=128)
    assert made.jitted.launches[0][2] == tuple(USUAL.values())
    with pytest.raises(TypeError, match="unexpected keyword argument 'n'"):
        shared.launch(3, block, x=WIDE, n=5, B=128)


def test_arguments_that_are_missing_or_unknown(made: Kernel) -> None:
    for changed, message in (
        ({"x": ...}, r"example.launch\(\) missing 1 required keyword-only argument: 'x'"),
        ({"FLAG": ...}, r"example.launch\(\) missing 1 required keyword-only argument: 'FLAG'"),
        ({"z": 1}, r"example.launch\(\) got an unexpected keyword argument 'z'"),
    ):
        arguments = {k: v for k, v in (USUAL | changed).items() if v is not ...}
        with pytest.raises(TypeError, match=message):
            made.launch(1, **arguments)
    with pytest.raises(TypeError, match="takes 1 positional argument but 2"):
        made.launch(1, WIDE)


def test_constants_come_last_in_a_signature() -> None:
    def mixed(x, B: tl.constexpr, n):  # type: ignore[no-untyped-def]
        pass

    with pytest.raises(TypeError, match=r"mixed: its tl.constexpr must come last"):
        kernel(mixed)


def test_numbers_that_vary_are_not_specialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    jitted = kernel(example).jitted
    assert [p.name for p in jitted.params if p.do_not_specialize] == ["n", "row_start"]


def test_names_of_arguments_are_those_of_some_kernel() -> None:
    """A number renamed in a kernel but not in `VARYING` would be specialised and recompiled."""
    modules = (paired, sigmoid, softmax, tiles)
    kernels = [k for m in modules for k in vars(m).values() if isinstance(k, Kernel)]
    names = {name for k in kernels for name in k.jitted.arg_names}
    assert set(VARYING) <= names
    assert set(Block.NAMES) <= {name.lower() for name in names}


@pytest.mark.parametrize(
    "changed",
    [
        {"x": WIDE.float()},
        {"x": WIDE[:, 1:]},  # not at a multiple of 16 bytes
        {"n": 33},
        {"n": 1},
        {"n": 1 << 40},
        {"n": None},
        {"x": None},
        {"x": Descriptor(WIDE, [4, 64])},
        {"x": Descriptor(WIDE, [4, 32]), "of": [4, 64]},
        {"x": None, "y": WIDE},
        {"B": 64},
        {"num_warps": 8},
        {"num_stages": 2},
        {"device": 1},
    ],
)
def test_arguments_that_need_another_kernel_go_through_triton(
    made: Kernel, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`of`: the tile of a descriptor in the launch before."""
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda *given: [])
    tile = changed.pop("of", None)
    made.launch(1, **USUAL | ({"x": Descriptor(WIDE, tile)} if tile else {}))
    device = changed.pop("device", 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    made.launch(1, **USUAL | changed)
    made.launch(1, **USUAL | changed)
    assert how_launched(made) == ["bound", "bound", "directly"]


def test_direct_launches_are_for_tested_versions(
    made: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, expected in (("3.6.0", True), ("3.6.1+git0", True), ("3.60.0", False)):
        monkeypatch.setattr(triton, "__version__", version)
        assert runpy.run_path(module.__file__)["past_binding"] is expected
    monkeypatch.setattr(module, "past_binding", False)
    for _ in range(3):
        made.launch(1, **USUAL)
    assert how_launched(made) == ["bound"] * 3


@pytest.mark.parametrize("name", module.PURPOSES)
def test_undocumented_names_of_triton(name: str) -> None:
    """A version of Triton that fails here must not join `TESTED`; a GPU tests the launch itself."""
    purpose = f"triton.{name}, which megabatch needs {module.PURPOSES[name]}"
    try:
        found = reduce(getattr, name.split("."), triton)
    except AttributeError:
        pytest.fail(f"this Triton has no {purpose}")
    if name.endswith("JITFunction.run"):
        body = inspect.getsource(found).rstrip()
        assert body.endswith("return kernel"), purpose
        assert "stream = driver.active.get_current_stream(device)" in body, purpose
        given = r"grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"
        hooks = r"knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, \*bound_args"
        assert re.search(rf"kernel.run\(grid_0, grid_1, {given}\s*{hooks}", body), purpose


@pytest.mark.skipif(not module.past_binding, reason="this Triton's launcher is not called directly")
def test_arguments_of_the_launcher_in_c() -> None:
    body = inspect.getsource(driver.CudaLauncher.__call__)
    given = r"stream, function, self.launch_cooperative_grid, self.launch_pdl,\s*global_scratch, "
    assert re.search(rf"self.launch\(gridX, gridY, gridZ, {given}profile_scratch, \*args\)", body)
    body = inspect.getsource(driver.wrap_handle_tensordesc)
    assert "final_args.extend(make_tensordesc_arg(arg, tensordesc_meta[tensordesc_idx]))" in body
    assert "return launcher(*final_args)" in body


@pytest.mark.gpu
def test_direct_launches_give_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run this with a new version of Triton before it joins `TESTED`."""
    found, bound, counts = [], [], []  # type: ignore[var-annotated]
    bind = Kernel._bind
    monkeypatch.setattr(Kernel, "_bind", lambda *given: (bound.append(1), bind(*given))[1])
    for past_binding in (False, True):
        monkeypatch.setattr(module, "past_binding", past_binding)
        for rows in (1000, 999, 1000, 1024):  # launches of new kinds, and known ones
            torch.manual_seed(rows)
            x, y = (torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            mine = x.requires_grad_(), y.requires_grad_()
            loss = mb.ClipLoss()(*mine, 2.0) + mb.SigLipLoss()(*mine, 2.0, -3.0)
            found.append([loss, *torch.autograd.grad(loss, mine)])
        counts.append(len(bound))
    assert counts[1] - counts[0] < counts[0]  # the third batch launched known kernels directly
    for through_triton, direct in zip(found[:4], found[4:], strict=True):
        for a, b in zip(through_triton, direct, strict=True):
            assert torch.equal(a, b)


def two(a, b):  # type: ignore[no-untyped-def]
    pass


_made = JITFunction(two)
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


def similar(argument: Any, data: st.DataObject) -> Any:
    """An argument that is often of the same kind."""
    if isinstance(argument, int):
        return argument + data.draw(st.sampled_from([0, 1, 15, 16, -32, 2**31, -(2**31)]))
    if isinstance(argument, torch.Tensor):
        return argument[data.draw(st.integers(0, 9)) :]
    return argument


@settings(deadline=None)
@given(st.tuples(*2 * [st.one_of(numbers, tensors, st.none(), st.booleans())]), st.data())
def test_arguments_of_one_kind_have_one_specialisation_in_triton(
    one: tuple[Any, ...], data: st.DataObject
) -> None:
    other = tuple(similar(argument, data) for argument in one)
    if flattened(one)[0] == flattened(other)[0]:
        assert _bound(*one)[1] == _bound(*other)[1]


def test_numbers_of_one_divisibility_are_of_one_kind() -> None:
    kinds, values = flattened((100, 160, 0, WIDE, None))
    assert kinds == flattened((101, 320, 0, WIDE[1:], None))[0]
    assert values == [100, 160, 0, WIDE.data_ptr(), None]
