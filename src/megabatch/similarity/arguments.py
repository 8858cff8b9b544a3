"""Checks of a caller's arguments: errors name the argument, its value and what was expected."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Integer types whose values int64 can hold.
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
INTEGERS = (*SIGNED, torch.uint8, torch.uint16, torch.uint32)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of logits, statistics and gradient accumulators for features of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_features(name: str, value: Any, *, tokens: bool = False) -> None:
    """`value` must be a dense (n, d) floating-point tensor with d > 0; with `tokens`, (n, l, d)."""
    shape = "(n, l, d)" if tokens else "(n, d)"
    if not isinstance(value, Tensor):
        _refuse_type(name, f"a tensor of shape {shape}", value)
    check_dense(name, value)
    if value.dtype not in FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise TypeError(f"{name}: expected one of {names}, got {value.dtype}")
    if value.dim() != 2 + tokens or 0 in value.shape[1:]:
        size = "l, d > 0" if tokens else "d > 0"
        raise ValueError(f"{name}: expected shape {shape} with {size}, got {tuple(value.shape)}")


def check_dense(name: str, value: Tensor) -> None:
    """`value` must be neither sparse, nor nested, nor distributed."""
    if hasattr(value, "full_tensor"):  # losses exchange rows between processes themselves
        raise TypeError(
            f"{name}: expected a tensor of this process, got a DTensor; pass {name}.full_tensor() "
            "for a parameter that FSDP2 shards, or let the model's forward return it, and "
            f"{name}.to_local() for features of which each process has rows of its own"
        )
    if value.is_nested or value.layout != torch.strided:
        came = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {came}")


def check_two(
    x: Any,
    y: Any,
    names: tuple[str, str] = ("x", "y"),
    *,
    autocast: bool = True,
    tokens: bool = False,
) -> None:
    """Two feature matrices that can be multiplied: same width, device and dtype.

    With `autocast` the dtypes are those after `cast_for_autocast`, which the caller is to call.
    With `tokens` each row is a matrix of tokens' features.
    """
    check_features(names[0], x, tokens=tokens)
    check_features(names[1], y, tokens=tokens)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"{names[1]}: expected width {x.shape[-1]} as {names[0]} has, got {y.shape[-1]}"
        )
    if x.dtype != y.dtype and not (autocast and product_dtype(x) == product_dtype(y)):
        raise TypeError(f"{names[1]}: expected {x.dtype} as {names[0]} has, got {y.dtype}")
    _check_device(names[1], y, x)


def check_same_rows(x: Tensor, y: Tensor, names: tuple[str, str] = ("x", "y")) -> None:
    """Row i of x belongs to row i of y, so there must be as many."""
    m, n = x.shape[0], y.shape[0]
    if m != n:
        raise ValueError(f"{names[1]}: expected {m} rows, one for each row of {names[0]}, got {n}")


def check_guide(
    guide: Any,
    x: Tensor,
    y: Tensor | None,
    names: tuple[str, str] = ("guide[0]", "guide[1]"),
    others: tuple[str, str] = ("x", "y"),
) -> tuple[Tensor, Tensor]:
    """Another model's features for the rows of x and of y, without a gradient.

    Of any width and dtype, but float64 exactly if x is. y=None: one matrix may serve both.
    """
    if isinstance(guide, Tensor) and y is None:
        guide = guide, guide
    guide_x, guide_y = _items("guide", guide, "(guide_x, guide_y)", 2)
    check_two(guide_x, guide_y, names, autocast=False)
    check_same_rows(x, guide_x, (others[0], names[0]))
    check_same_rows(x if y is None else y, guide_y, (others[0 if y is None else 1], names[1]))
    _check_device(names[0], guide_x, x)
    if (guide_x.dtype == torch.float64) != (x.dtype == torch.float64):
        expected = "float64" if x.dtype == torch.float64 else "no float64"
        raise TypeError(
            f"{names[0]}: expected {expected} since {others[0]} has {x.dtype}, got {guide_x.dtype}"
        )
    return guide_x.detach(), guide_y.detach()


def check_teacher(teacher: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Features as of `check_guide`, and a scale and a bias, all without a gradient."""
    *features, scale, bias = _items("teacher", teacher, "(features, features, scale, bias)", 4)
    both = check_guide(features, x, y, ("teacher[0]", "teacher[1]"))
    scale = check_scalar("teacher[2]", scale, x).detach()
    return *both, scale, check_scalar("teacher[3]", bias, x).detach()


def as_number(value: Any) -> float | None:
    """A real number as a float, NumPy's scalars and 0-d arrays included; None for all else."""
    if isinstance(value, (int, float)):  # all that torch.compile can trace
        return None if isinstance(value, bool) else float(value)
    if getattr(value, "shape", None) == () and not isinstance(value, Tensor):
        value = value.item()
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if real else None


def check_scalar(name: str, value: Any, like: Tensor) -> Tensor:
    """A number, or a tensor of shape () or (1,), as a 0-d tensor in the accumulator's dtype.

    A number becomes a filled tensor rather than a copy from the host, which a CUDA graph could
    not capture.
    """
    dtype = accumulator_dtype(like.dtype)
    number = None if isinstance(value, Tensor) else as_number(value)
    if number is not None:
        return torch.full((), number, dtype=dtype, device=like.device)
    if not isinstance(value, Tensor):
        _refuse_type(name, "a number or a tensor", value)
    check_dense(name, value)
    if value.shape not in ((), (1,)):
        raise ValueError(f"{name}: expected shape () or (1,), got {tuple(value.shape)}")
    if not value.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {value.dtype}")
    _check_device(name, value, like)
    value = value.reshape(()) if value.dim() else value  # an operator less, and its derivative
    return value.to(dtype)


def check_vector(name: str, value: Any, shape: int | tuple[int, ...], like: Tensor) -> Tensor:
    """One floating-point number a row, of so many rows or (b, k), in the accumulator's dtype."""
    shape = tuple(shape) if isinstance(shape, tuple) else (shape,)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        _refuse_type(name, f"a floating-point tensor of shape {shape}", value)
    return _one_a_row(name, value, shape, like).to(accumulator_dtype(like.dtype))


def check_integers(name: str, value: Any, length: int, like: Tensor) -> Tensor:
    """One integer a row, in any integer dtype that int64 can hold, as int64."""
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS:
        _refuse_type(name, f"a tensor of shape ({length},), int64 or a smaller integer", value)
    return _one_a_row(name, value, (length,), like).to(torch.int64)


def check_ids(
    ids: Any, x: Tensor, y: Tensor, *, one: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """ "paired", which gives (None, None), or integers of the rows of x and of y.

    With `one`, one vector may serve both.
    """
    if isinstance(ids, str):
        if ids != "paired":
            raise ValueError(f"ids: expected 'paired' or int64 tensors, got {ids!r}")
        return None, None
    if isinstance(ids, Tensor) and one:
        both = check_integers("ids", ids, x.shape[0], x)
        return both, both
    return check_id_pair(ids, x, y, "'paired' or (row_ids, column_ids)")


def check_id_pair(ids: Any, x: Tensor, y: Tensor, expected: str) -> tuple[Tensor, Tensor]:
    """Integers of the rows of x and of y. `expected`: a description of the argument."""
    row_ids, col_ids = _items("ids", ids, expected, 2)
    row_ids = check_integers("ids[0]", row_ids, x.shape[0], x)
    return row_ids, check_integers("ids[1]", col_ids, y.shape[0], x)


def _items(name: str, value: Any, expected: str, count: int) -> Sequence[Any]:
    """A tuple or a list of so many items."""
    is_sequence = isinstance(value, (tuple, list))
    if is_sequence and len(value) == count:
        return value
    came = "one tensor" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(
        f"{name}: expected {expected}, got {f'{len(value)} items' if is_sequence else came}"
    )


def _one_a_row(name: str, value: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(value.shape)}")
    _check_device(name, value, like)
    return value


def _check_device(name: str, value: Tensor, like: Tensor) -> None:
    if value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {value.device}")


def _refuse_type(name: str, expected: str, value: Any) -> NoReturn:
    came = value.dtype if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"{name}: expected {expected}, got {came}")


def extremes(values: Tensor) -> tuple[float, float] | None:
    """The smallest and the largest of some numbers, NaN if one is, where reading them is free.

    None if there are none, and where there is nothing to read yet or reading would stall: on
    devices other than the CPU, in `torch.compile`, for fake tensors, under `vmap`.
    """
    if torch.compiler.is_compiling() or type(values) not in (Tensor, nn.Parameter):
        return None
    if values.device.type != "cpu" or not values.numel():
        return None
    try:
        low, high = torch.aminmax(values.detach())
        return low.item(), high.item()
    except RuntimeError:  # of torch.func and make_fx: the tensor stands for others
        return None


def product_dtype(features: Tensor) -> torch.dtype:
    """The dtype that features would have as a matmul's operand under the current autocast."""
    kind = features.device.type
    if kind == "meta" or features.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return features.dtype
    return torch.get_autocast_dtype(kind)


def cast_for_autocast(*features: Tensor) -> tuple[Tensor, ...]:
    """Features in the dtype that a matmul's operands would have under the current autocast."""
    return tuple([f.to(product_dtype(f)) for f in features])
