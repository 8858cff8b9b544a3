"""torch.func's transforms, of which some are refused with an error, and tensors without data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from megabatch import similarity
from tests.similarity.distributed.processes import World, on_processes

ROWS, WIDTH = 7, 5
IDS = torch.tensor([0, 0, 1, 2, 2, 2, -1])


def logsumexp(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    rows, columns = similarity.logsumexp(x, y, scale)
    assert columns is not None
    return rows + 2 * columns


def split(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    rows, columns = similarity.split_logsumexp(x, y, scale)
    assert columns is not None
    return rows.negative + rows.positive + columns.positive_sum - 2 * columns.negative


def self_similarity(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    rows, _ = similarity.split_logsumexp(x, None, scale, ids=IDS)
    return rows.negative + (y * 3).sum(1)


def softplus_sum(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return similarity.softplus_sum(x, y, scale, scale - 3, ids=(IDS, IDS.flip(0)))


def paired(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return similarity.paired(x, y, scale)


FUNCTIONS = [logsumexp, split, self_similarity, softplus_sum, paired]
functions = pytest.mark.parametrize("function", FUNCTIONS)


def inputs(*batch: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = (torch.randn(*batch, ROWS, WIDTH, dtype=torch.float64) for _ in range(2))
    return x, y, torch.rand(batch, dtype=torch.float64) + 1


def summed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *a: function(*a).sum() ** 2


def by_autograd(function: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> tuple[Any, ...]:
    leaves = [a.detach().clone().requires_grad_() for a in arguments]
    return torch.autograd.grad(function(*leaves), leaves)


@functions
def test_gradients(function: Callable[..., Tensor]) -> None:
    arguments, loss = inputs(), summed(function)
    truth = by_autograd(loss, arguments)
    torch.testing.assert_close(grad(loss, argnums=(0, 1, 2))(*arguments), truth)
    value, pullback = vjp(loss, *arguments)
    torch.testing.assert_close(pullback(torch.ones_like(value)), truth)
    truth = torch.autograd.functional.jacobian(function, arguments)
    torch.testing.assert_close(jacrev(function, argnums=(0, 1, 2))(*arguments), truth)


def entries(arguments: tuple[Tensor, ...], dims: tuple[int | None, ...]) -> list[Any]:
    """The arguments of each of three calls."""
    return [
        tuple(a[k] if dim == 0 else a for a, dim in zip(arguments, dims, strict=True))
        for k in range(3)
    ]


@functions
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0)])
def test_vmap_is_a_loop(function: Callable[..., Tensor], dims: tuple[int | None, ...]) -> None:
    """Values, gradients inside vmap and gradients through it, over any of the inputs."""
    choices = zip(inputs(3), inputs(), dims, strict=True)
    arguments = tuple(many if dim == 0 else one for many, one, dim in choices)
    over, numbers = vmap(function, in_dims=dims), (0, 1, 2)
    looped = [function(*each) for each in entries(arguments, dims)]
    torch.testing.assert_close(over(*arguments), torch.stack(looped))

    loss = summed(function)
    inside = vmap(grad(loss, argnums=numbers), in_dims=dims)(*arguments)
    each = [by_autograd(loss, each) for each in entries(arguments, dims)]
    torch.testing.assert_close(inside, tuple(map(torch.stack, zip(*each, strict=True))))

    through = grad(lambda *a: (over(*a) ** 2).sum(), argnums=numbers)(*arguments)
    truth = by_autograd(
        lambda *a: torch.stack([(function(*each) ** 2).sum() for each in entries(a, dims)]).sum(),
        arguments,
    )
    torch.testing.assert_close(through, truth)


def test_vmap_over_an_empty_dimension() -> None:
    with pytest.raises(ValueError, match="at least one entry"):
        vmap(logsumexp)(*(a[:0] for a in inputs(1)))


# --- refused --------------------------------------------------------------------------------------


@functions
def test_forward_mode_is_refused(function: Callable[..., Tensor]) -> None:
    x, y, scale = inputs()
    loss = lambda x: function(x, y, scale).sum()  # noqa: E731

    def dual() -> None:
        with forward_ad.dual_level():
            loss(forward_ad.make_dual(x, x))

    calls: list[Callable[[], Any]] = [
        lambda: jvp(loss, (x,), (x,)),
        lambda: jacfwd(loss)(x),
        lambda: hessian(loss)(x),
        dual,
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"megabatch \w+: .*got forward mode"):
            call()


@pytest.mark.parametrize(
    ("function", "leaf"),
    # Not where the function is a plain product of that argument, which torch derives by itself.
    [
        p
        for p in itertools.product(FUNCTIONS, range(3))
        if p not in ((paired, 2), (self_similarity, 1))
    ],
)
def test_second_derivatives_are_refused(function: Callable[..., Tensor], leaf: int) -> None:
    """Also of a loss whose first derivatives have a graph through the upstream gradient alone."""
    arguments = list(inputs())
    arguments[leaf].requires_grad_()
    loss = summed(function)
    (first,) = torch.autograd.grad(loss(*arguments), arguments[leaf], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"megabatch \w+: expected at most first"):
        torch.autograd.grad((first**2).sum(), arguments[leaf])
    with pytest.raises(NotImplementedError, match=r"megabatch \w+: expected at most first"):
        jacrev(jacrev(loss, argnums=leaf), argnums=leaf)(*(a.detach() for a in arguments))


@pytest.mark.parametrize("call", ["ranks", "topk"])
def test_rankings_refuse_transforms(call: str) -> None:
    x, y, _ = inputs(2)
    last: Any = torch.zeros(ROWS, dtype=torch.int64) if call == "ranks" else 2

    def rank(x: Tensor) -> Tensor:
        return getattr(similarity, call)(x, y[0], last)[0].sum()

    for transformed in (lambda: vmap(rank)(x), lambda: grad(rank)(x[0])):
        with pytest.raises(NotImplementedError, match=f"{call}: expected a call outside"):
            transformed()


@on_processes(2)
def test_over_several_processes(world: World) -> None:
    """`grad` gives autograd's gradients; vmap is refused before any transfer."""
    torch.manual_seed(world.rank)
    arguments = inputs()
    for function in (logsumexp, split, softplus_sum):
        loss = function if function is softplus_sum else summed(function)
        found = grad(loss, argnums=(0, 1, 2))(*arguments)
        torch.testing.assert_close(found, by_autograd(loss, arguments))
        with pytest.raises(NotImplementedError, match="several processes"):
            vmap(function)(*inputs(2))


# --- without data ---------------------------------------------------------------------------------


def test_large_features_on_meta_take_no_time() -> None:
    x, y = (torch.empty(10_000_000, 512, device="meta", requires_grad=True) for _ in range(2))
    rows, _ = similarity.logsumexp(x, y, 10.0)
    assert rows.shape == (10_000_000,)
    above, equal = similarity.ranks(x, y, torch.empty(10_000_000, dtype=torch.int64, device="meta"))
    assert above.is_meta
    assert above.shape == equal.shape == (10_000_000,)
    scores, indices = similarity.topk(x, y, 10)
    assert scores.is_meta
    assert scores.shape == indices.shape == (10_000_000, 10)
    assert (scores.dtype, indices.dtype) == (torch.float32, torch.int64)


# --- what takes the operators as they are ---------------------------------------------------------


@functions
def test_activation_checkpointing(function: Callable[..., Tensor]) -> None:
    arguments = [a.requires_grad_() for a in inputs()]
    truth = torch.autograd.grad(function(*arguments).sum(), arguments)
    again = checkpoint(function, *arguments, use_reentrant=False).sum()
    for a, b in zip(torch.autograd.grad(again, arguments), truth, strict=True):
        torch.testing.assert_close(a, b)
