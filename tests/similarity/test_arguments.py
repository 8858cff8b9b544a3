"""Wrong arguments: each error names the argument, what came and what was expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megabatch import similarity

X, Y = torch.randn(6, 4), torch.randn(5, 4)
IDS = torch.arange(6), torch.arange(5)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([1.0], Y), TypeError, ("x", "list", "tensor")),
        ((X[0], Y), ValueError, ("x", "(4,)", "(n, d)")),
        ((X[:, :0], Y), ValueError, ("x", "(6, 0)", "d > 0")),
        ((X, Y[:, :3]), ValueError, ("y", "width 4", "3")),
        ((X.long(), Y), TypeError, ("x", "int64", "float32")),
        ((X, Y.double()), TypeError, ("y", "float32", "float64")),
        ((X, Y.to("meta")), ValueError, ("y", "cpu", "meta")),
        ((X, Y, "hot"), TypeError, ("scale", "str", "number")),
        ((X, Y, torch.ones(2)), ValueError, ("scale", "(2,)", "(1,)")),
        ((X, Y, torch.tensor(1)), TypeError, ("scale", "int64")),
        ((X, Y, True), TypeError, ("scale", "bool")),
    ],
)
def test_features_and_scale(arguments: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        similarity.logsumexp(*arguments)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, ("y", "6 rows", "5")),
        ({"ids": "pairs"}, ValueError, ("ids", "'pairs'", "'paired'")),
        ({"ids": IDS[0]}, TypeError, ("ids", "one tensor")),
        ({"ids": (IDS[0],)}, TypeError, ("ids", "1 items")),
        ({"ids": 3}, TypeError, ("ids", "int")),
        ({"ids": IDS, "positives": "own"}, ValueError, ("positives", "'own'", "'paired'")),
        ({"ids": IDS, "positives": "paired"}, ValueError, ("y", "6 rows", "5")),
        ({"ids": (IDS[1], IDS[1])}, ValueError, ("ids[0]", "(6,)", "(5,)")),
        ({"ids": (IDS[0], IDS[0])}, ValueError, ("ids[1]", "(5,)", "(6,)")),
        ({"ids": (IDS[0].int(), IDS[1])}, TypeError, ("ids[0]", "int64", "int32")),
        ({"ids": (IDS[0], [1, 2])}, TypeError, ("ids[1]", "list")),
        ({"ids": IDS, "ceiling": torch.ones(5)}, ValueError, ("ceiling", "(6,)", "(5,)")),
        ({"ids": IDS, "ceiling": 0.5}, TypeError, ("ceiling", "float")),
        ({"ids": IDS, "sides": "columns"}, ValueError, ("sides", "'columns'", "'rows'")),
        ({"ids": IDS, "group": "world"}, TypeError, ("group", "'world'", "'local'")),
    ],
)
def test_options(options: dict[str, Any], error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        similarity.split_logsumexp(X, Y, **options)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: similarity.paired(X, Y), ValueError, ("y", "6 rows", "5")),
        (lambda: similarity.topk(X, Y, 6), ValueError, ("k", "1 to 5", "6")),
        (lambda: similarity.topk(X, Y, 0), ValueError, ("k", "0")),
        (lambda: similarity.topk(X, Y, 1.0), TypeError, ("k", "float")),
        (lambda: similarity.topk(X, Y, 1, ids=3), TypeError, ("ids", "int")),
        (lambda: similarity.ranks(X, Y, IDS[1]), ValueError, ("target", "(6,)", "(5,)")),
        (lambda: similarity.ranks(X, Y, IDS[0]), IndexError, ("target", "[0, 5)", "0 to 5")),
        (lambda: similarity.ranks(X, Y, IDS[0] - 1), IndexError, ("target", "-1 to 4")),
        (lambda: similarity.set_workspace(1), ValueError, ("size", "65536", "1")),
        (lambda: similarity.set_workspace(1e9), TypeError, ("size", "float")),
    ],
)
def test_other_calls(call: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words)
