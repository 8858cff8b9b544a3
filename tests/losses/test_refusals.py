"""Wrong arguments: the error names the argument, its value or type, and what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nested import nested_tensor

import megabatch as mb
from tests.losses.cases import DIRECT, LOSSES

pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.ones(6, 4)
L = torch.arange(6)
GUIDES = {"guide_query": X, "guide_positive": X}
LOG_Q = {"log_q": -torch.ones(6)}
HARD: dict[str, Any] = {"hardness_mode": "hard_negatives"}
TEACHER = {"dist_image_features": X, "dist_text_features": X, "dist_logit_scale": 2.0}
TOWERS = {"image": X, "text": X}


def clip(x: Any = X, y: Any = X, scale: Any = 1.0, **options: Any) -> Any:
    return mb.ClipLoss()(x, y, scale, **options)


def siglip(x: Any = X, y: Any = X, scale: Any = 1.0, bias: Any = 0.0, **options: Any) -> Any:
    return mb.SigLipLoss()(x, y, scale, bias, **options)


def distill(**changes: Any) -> Any:
    towers = {"image_features": X, "text_features": X, "logit_scale": 1.0}
    return mb.DistillClipLoss()(**(towers | TEACHER | changes))


def infonce(**changes: Any) -> Any:
    return mb.InfoNCELoss(0.1, margin=0.0)(**({"query": X, "positive": X} | changes))


def made_infonce(**options: Any) -> Any:
    return mb.InfoNCELoss(**({"temperature": 0.1} | options))


def modalities(features: Any, **options: Any) -> Any:
    loss = mb.MultiModalLoss([("image", "text")])
    return loss(features, **({"logit_scale": 1.0} | options))


def pairs(*pairs: Any, **options: Any) -> Any:
    return mb.MultiModalLoss(pairs, **options)


def matryoshka(loss: Any = None, dims: Any = (2,), **options: Any) -> Any:
    return mb.MatryoshkaLoss(loss or mb.ClipLoss(), dims, **options)


def cut(*args: Any, **named: Any) -> Any:
    return mb.MatryoshkaLoss(mb.ClipLoss(), [2, 4])(*args, **named)


#: A call, the arguments with which it raises, and words of the error.
REFUSED: list[tuple[Any, dict[str, Any], type, tuple[str, ...]]] = [
    (clip, {"y": X[:5]}, ValueError, ("text_features", "6 rows", "5")),
    (clip, {"y": X[:, :2]}, ValueError, ("text_features", "width 4", "2")),
    (clip, {"x": X[0]}, ValueError, ("image_features", "(4,)")),
    (clip, {"x": X.long()}, TypeError, ("image_features", "int64")),
    (clip, {"x": X[:0], "y": X[:0]}, ValueError, ("image_features", "one row", "0")),
    (clip, {"y": X.half()}, TypeError, ("text_features", "float16")),
    (clip, {"scale": "warm"}, TypeError, ("logit_scale", "str")),
    (clip, {"scale": torch.ones(2)}, ValueError, ("logit_scale", "(2,)")),
    (clip, {"logit_bias": torch.ones(2)}, ValueError, ("logit_bias", "(2,)")),
    (clip, {"ids": L[:5]}, ValueError, ("ids", "(6,)", "(5,)")),
    (clip, {"ids": L.float()}, TypeError, ("ids", "int64", "float32")),
    (clip, {"ids": L + 2**62}, ValueError, ("ids", "2**62", str(2**62 + 5))),
    (clip, {"weights": torch.ones(5)}, ValueError, ("weights", "(6,)", "(5,)")),
    (clip, {"weights": L}, TypeError, ("weights", "int64")),
    (clip, {"weights": torch.ones(6).requires_grad_()}, ValueError, ("weights", "gradient")),
    (mb.ClipLoss, {"label_smoothing": 1.0}, ValueError, ("label_smoothing", "1.0")),
    (mb.ClipLoss, {"label_smoothing": "0.1"}, TypeError, ("label_smoothing", "str")),
    (mb.ClipLoss, {"duplicates": "dropped"}, ValueError, ("duplicates", "'dropped'", "ignored")),
    (
        *(mb.ClipLoss, {"duplicates": "ignored", "label_smoothing": 0.1}, ValueError),
        ("label_smoothing", "ignored", "0.1"),
    ),
    (lambda **o: mb.ClipLoss(**o)(X, X, 1.0), {"group": "world"}, TypeError, ("group",)),
    (distill, {"dist_text_features": X[:3]}, ValueError, ("dist_text_features", "6 rows", "3")),
    (distill, {n: X[:3] for n in list(TEACHER)[:2]}, ValueError, ("dist_image_features", "6 rows")),
    (distill, {n: X.double() for n in list(TEACHER)[:2]}, TypeError, ("dist_image_features",)),
    (distill, {"dist_logit_scale": "one"}, TypeError, ("dist_logit_scale", "a number", "str")),
    (distill, {"dist_image_features": None}, TypeError, ("dist_image_features", "NoneType")),
    (siglip, {"x": X[:0], "y": X[:0]}, ValueError, ("image_features", "one row", "0")),
    (siglip, {"scale": "x"}, TypeError, ("logit_scale", "str")),
    (siglip, {"bias": torch.ones(2)}, ValueError, ("logit_bias", "(2,)")),
    (siglip, {"ids": L[:4]}, ValueError, ("ids", "(6,)", "(4,)")),
    (siglip, {"weights": torch.ones(4)}, ValueError, ("weights", "(6,)", "(4,)")),
    (siglip, TEACHER | {"dist_text_features": None}, ValueError, ("dist_text_features", "None")),
    (siglip, TEACHER | {"dist_logit_scale": None}, ValueError, ("dist_logit_scale", "None")),
    (siglip, TEACHER | {"dist_text_features": X[:, 1:]}, ValueError, ("dist_text_features", "4")),
    (
        siglip,
        TEACHER | {"dist_image_features": X[:4]},
        ValueError,
        ("dist_image_features", "6 row"),
    ),
    (siglip, TEACHER | {"ids": L}, ValueError, ("ids", "teacher")),
    (infonce, {"positive": X[:5]}, ValueError, ("positive", "6 rows", "5")),
    (infonce, {"query": X[:0], "positive": X[:0]}, ValueError, ("query", "one row", "0")),
    (infonce, {"negatives": X[0]}, ValueError, ("negatives", "(k, d)", "(b, k, d)", "(4,)")),
    (infonce, {"negatives": X[:, :3]}, ValueError, ("negatives", "width 4", "3")),
    (infonce, {"negatives": X.double()}, TypeError, ("negatives", "float64")),
    (infonce, {"negatives": X[:5, None]}, ValueError, ("negatives", "6 rows", "5")),
    (infonce, {"negatives": Y.to_sparse()}, TypeError, ("negatives", "dense", "layout")),
    (infonce, {"queue": X[:, :2]}, ValueError, ("queue", "width 4", "2")),
    (infonce, {"ids": L[:5]}, ValueError, ("ids", "(6,)", "(5,)")),
    (infonce, {"weights": torch.ones(7)}, ValueError, ("weights", "(6,)", "(7,)")),
    (infonce, {"temperature": torch.ones(3)}, ValueError, ("temperature", "(3,)")),
    (infonce, {"log_q": torch.ones(5)}, ValueError, ("log_q", "(6,)", "(5,)")),
    (infonce, {"log_q": L}, TypeError, ("log_q", "floating-point", "int64")),
    (infonce, {"log_q": [0.1] * 6}, TypeError, ("log_q", "floating-point", "list")),
    (infonce, {"log_q": torch.zeros(6).log()}, ValueError, ("log_q", "finite", "never", "-inf")),
    (infonce, {"log_q": torch.ones(6) * torch.nan}, ValueError, ("log_q", "finite", "nan")),
    (infonce, {"log_q_queue": Y[0]}, ValueError, ("log_q", "for positive too", "None")),
    (
        infonce,
        LOG_Q | {"negatives": X},
        ValueError,
        ("log_q_negatives", "for negatives too", "None"),
    ),
    (infonce, LOG_Q | {"log_q_queue": Y[0]}, ValueError, ("log_q_queue", "None without queue")),
    (
        *(infonce, LOG_Q | {"negatives": X[:, None], "log_q_negatives": X[:, 0]}, ValueError),
        ("log_q_negatives", "(6, 1)", "(6,)"),
    ),
    *(
        (lambda o=options: made_infonce(**o)(X, X, **LOG_Q), {}, ValueError, ("log_q", "None with"))
        for options in (
            *({"same_tower": ("positive",)}, {"reverse": "joint"}, {"tau_plus": 0.1}),
            *({"label_smoothing": 0.1}, {"hardness_mode": "all_negatives"}),
        )
    ),
    (infonce, {"guide_query": X}, ValueError, ("guide_positive", "guide's features", "None")),
    (infonce, GUIDES | {"negatives": X}, ValueError, ("guide_negatives", "None")),
    (infonce, GUIDES | {"guide_queue": X}, ValueError, ("guide_queue", "None without queue")),
    (infonce, GUIDES | {"guide_query": X[1:]}, ValueError, ("guide_query", "(6, d')", "(5, 4)")),
    (infonce, GUIDES | {"guide_query": [1]}, TypeError, ("guide_query", "(6, d')", "list")),
    (infonce, GUIDES | {"guide_positive": X.double()}, TypeError, ("guide_positive", "float64")),
    (
        *(infonce, GUIDES | {"negatives": X[:, None], "guide_negatives": X}, ValueError),
        ("guide_negatives", "(6, 1, d')", "(6, 4)"),
    ),
    (lambda **g: mb.InfoNCELoss(0.1)(X, X, **g), GUIDES, ValueError, ("margin", "guide", "None")),
    *(
        (
            lambda options=options: mb.InfoNCELoss(0.1, **options)(X, X, X),
            *({}, ValueError, ("negatives", "(b, k, d)", f"{next(iter(options))}=")),
        )
        for options in ({"share_negatives": True}, HARD)
    ),
    (made_infonce, {"temperature": "x"}, TypeError, ("temperature", "str")),
    (made_infonce, {"temperature": torch.tensor(1)}, TypeError, ("temperature", "int64")),
    (made_infonce, {"margin": "0.1"}, TypeError, ("margin", "str")),
    (made_infonce, {"margin_strategy": "share"}, ValueError, ("margin_strategy", "relative")),
    (made_infonce, {"same_tower": "query"}, TypeError, ("same_tower", "'query'")),
    (made_infonce, {"same_tower": ("both",)}, ValueError, ("same_tower", "both", "positive")),
    (made_infonce, {"same_tower": ("query",) * 2}, ValueError, ("same_tower", "once", "'query'")),
    (made_infonce, {"label_smoothing": 1.0}, ValueError, ("label_smoothing", "below 1", "1.0")),
    (made_infonce, {"reverse": "both"}, ValueError, ("reverse", "joint, separate", "'both'")),
    (
        *(made_infonce, {"reverse": "separate", "same_tower": ("query",)}, ValueError),
        ("reverse", "same_tower", "'separate'"),
    ),
    (made_infonce, {"share_negatives": 1}, TypeError, ("share_negatives", "True or False", "1")),
    (made_infonce, {"hardness_mode": "hard"}, ValueError, ("hardness_mode", "hard_negatives")),
    (made_infonce, {"hardness_strength": 1}, ValueError, ("hardness_strength", "None", "1")),
    (made_infonce, HARD | {"hardness_strength": -1}, ValueError, ("hardness_strength", "-1")),
    *(
        (made_infonce, {name: 0.1, other: value}, ValueError, (name, "0 with", f"{other}=", "0.1"))
        for name in ("label_smoothing", "tau_plus")
        for other, value in (
            *(("margin", 0.0), ("same_tower", ("query",)), ("reverse", "joint")),
            ("hardness_mode", "all_negatives"),
        )
    ),
    (
        made_infonce,
        {"label_smoothing": 0.1, "tau_plus": 0.1},
        ValueError,
        ("tau_plus", "smoothing"),
    ),
    *(
        (
            lambda o=name: made_infonce(**{o: 0.1})(X, X, ids=L),
            {},
            ValueError,
            ("ids", f"{name}=0.1"),
        )
        for name in ("label_smoothing", "tau_plus")
    ),
    *(
        (lambda v=views, c=loss: c(0.5)(*v), {}, error, words)
        for loss in (mb.NTXentLoss, mb.DCLLoss)
        for views, error, words in (
            ((X,), TypeError, ("views", "two", "1")),
            ((X, X[:5]), ValueError, ("views[1]", "6 rows", "5")),
            ((X, X, X[:, :2]), ValueError, ("views[2]", "width 4", "2")),
            ((X, X.double()), TypeError, ("views[1]", "float64")),
            ((None, X), TypeError, ("views[0]", "NoneType")),
            ((X[:0], X[:0]), ValueError, ("views", "one row", "0")),
        )
    ),
    *(
        (lambda o=options, c=loss: c(0.5, **o)(X, X, X), {}, error, words)
        for loss, options, error, words in (
            (mb.DCLLoss, {"sigma": 0}, ValueError, ("sigma", "positive", "0")),
            (mb.DCLLoss, {"sigma": 0.5}, ValueError, ("views", "two", "sigma=0.5", "3")),
            (mb.NTXentLoss, {"tau_plus": 1.0}, ValueError, ("tau_plus", "below 1", "1.0")),
            (mb.NTXentLoss, {"tau_plus": 0.1}, ValueError, ("views", "two", "tau_plus=0.1", "3")),
        )
    ),
    *(
        (lambda a=arguments, c=loss: c(0.1)(*a), {}, error, words)
        for loss in (mb.SupConLoss, mb.SincereLoss)
        for arguments, error, words in (
            ((X[0], L), ValueError, ("embeddings", "(4,)")),
            ((X, L[:5]), ValueError, ("labels", "(6,)", "(5,)")),
            ((X, L.float()), TypeError, ("labels", "int64", "float32")),
            ((X, L, X), ValueError, ("reference_labels", "None")),
            ((X, L, None, L), ValueError, ("references", "None")),
            ((X, L, X[:, :3], L), ValueError, ("references", "width 4", "3")),
            ((X, L, X[:5], L), ValueError, ("reference_labels", "(5,)", "(6,)")),
        )
    ),
    (mb.SupConLoss, {"temperature": None}, TypeError, ("temperature", "NoneType")),
    (mb.SupConLoss, {"temperature": 1, "form": "x"}, ValueError, ("form", "out, in", "'x'")),
    (mb.SincereLoss, {"temperature": 1, "average": "x"}, ValueError, ("average", "pairs", "'x'")),
    (matryoshka, {"loss": 3}, TypeError, ("loss", "int")),
    (matryoshka, {"dims": ()}, ValueError, ("dims", "none")),
    (matryoshka, {"dims": (0,)}, ValueError, ("dims", "0")),
    (matryoshka, {"dims": (2.0,)}, TypeError, ("dims", "float")),
    (matryoshka, {"dims": (2, 4), "weights": (1.0,)}, ValueError, ("weights", "2", "1")),
    (matryoshka, {"weights": (-1.0,)}, ValueError, ("weights", "-1.0")),
    (lambda: cut(X, X[:, :3], 1.0), {}, ValueError, ("argument 1", "4", "got 3")),
    (lambda: cut(X, text_features=X[:, :3]), {}, ValueError, ("text_features", "4", "got 3")),
    (lambda: cut({"a": X, "b": X[:, :3]}), {}, ValueError, ("argument 0['b']", "4", "got 3")),
    (lambda: cut(torch.ones(3), 1.0), {}, ValueError, ("features", "none")),
    (lambda: pairs(), {}, ValueError, ("pairs", "none")),
    (lambda: pairs(("image",)), {}, ValueError, ("pairs", "two names", "image")),
    (lambda: pairs(("image", 3)), {}, ValueError, ("pairs", "3")),
    (lambda: pairs(("a", "a")), {}, ValueError, ("pairs", "different", "('a', 'a')")),
    (lambda: pairs(("a", "b"), "ab"), {}, TypeError, ("pairs", "pairs of names", "'ab'")),
    (
        lambda **o: pairs(("a", "b"), **o),
        {"weights": (1.0, 2.0)},
        ValueError,
        ("weights", "1", "2"),
    ),
    (lambda **o: pairs(("a", "b"), **o), {"weights": (-1.0,)}, ValueError, ("weights", "-1.0")),
    (lambda **o: pairs(("a", "b"), **o), {"loss": "clip"}, TypeError, ("loss", "str")),
    *(
        (lambda a=features, o=options: modalities(a, **o), {}, error, words)
        for features, options, error, words in (
            (X, {}, TypeError, ("features", "Tensor")),
            ({"image": X}, {}, ValueError, ("features", "'text'", "image")),
            ({"image": None, "text": None}, {}, ValueError, ("features", "None")),
            ({"image": X, "text": X[:5]}, {}, ValueError, ("features['text']", "6 rows", "5")),
            ({"image": X[0], "text": X}, {}, ValueError, ("features['image']", "(4,)")),
            (TOWERS, {"present": X}, TypeError, ("present", "Tensor")),
            (TOWERS, {"present": {"audio": X}}, ValueError, ("present", "'audio'", "image")),
            (TOWERS, {"present": {"text": X}}, TypeError, ("present['text']", "bool", "float32")),
            (TOWERS, {"present": {"text": [True]}}, TypeError, ("present['text']", "list")),
            (TOWERS, {"present": {"text": L[1:] > 0}}, ValueError, ("present['text']", "(5,)")),
            (TOWERS, {"logit_scale": {("a", "b"): 1.0}}, ValueError, ("logit_scale", "'text'")),
        )
    ),
]


@pytest.mark.parametrize(
    ("call", "arguments", "error", "words"),
    REFUSED,
    ids=[f"{k}-{'-'.join(case[3])}" for k, case in enumerate(REFUSED)],
)
def test_refused(call: Any, arguments: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        call(**arguments)
    assert str(caught.value).startswith(words[0])
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", DIRECT)
def test_features_that_are_not_dense(name: str) -> None:
    x = torch.randn(6, 8)
    for bad, word in (
        (x.to_sparse(), "sparse_coo"),
        (nested_tensor([x, x], layout=torch.jagged), "nested"),
        (x.to(torch.complex64), "complex64"),
    ):
        for arguments in ((bad, x), (x, bad)):
            with pytest.raises((TypeError, ValueError)) as caught:
                LOSSES[name](*arguments, 2.0)
            assert word in str(caught.value)


WEIGHTED = [
    lambda w: mb.ClipLoss()(X, Y, 2.0, weights=w),
    lambda w: mb.SigLipLoss()(X, Y, 2.0, -1.0, weights=w),
    lambda w: mb.InfoNCELoss(0.5)(X, Y, weights=w),
]


@pytest.mark.parametrize("bad", [-1.0, -1e-30, float("nan"), float("inf")])
def test_weights_that_are_negative_or_no_numbers(bad: float) -> None:
    weights = torch.ones(6)
    weights[2] = bad
    for loss in WEIGHTED:
        with pytest.raises(ValueError, match=r"weights: expected finite, non-negative numbers"):
            loss(weights)
        loss(torch.zeros(6))


TEMPERATURE_LOSSES = [mb.InfoNCELoss, mb.NTXentLoss, mb.DCLLoss, mb.SupConLoss, mb.SincereLoss]


@pytest.mark.parametrize("loss_class", TEMPERATURE_LOSSES)
@pytest.mark.parametrize("bad", [0.0, -0.1, float("nan"), float("inf")])
def test_temperatures_that_are_not_positive(loss_class: Any, bad: float) -> None:
    other = L if loss_class in (mb.SupConLoss, mb.SincereLoss) else Y

    def refuses(call: Any, *arguments: Tensor, **named: Any) -> None:
        with pytest.raises(ValueError, match="temperature: expected a positive"):
            call(*arguments, **named)

    for made in (bad, torch.tensor(bad), torch.tensor([bad]).half(), np.float32(bad)):
        refuses(loss_class, made)  # type: ignore[arg-type]
        refuses(loss_class(0.1), X, other, temperature=made)
    learnt = nn.Parameter(torch.tensor(0.1))
    loss, plain = loss_class(learnt), loss_class(0.1)
    with torch.no_grad():
        learnt.fill_(bad)  # an optimizer can do this
    plain.temperature = bad
    refuses(loss, X, other)
    refuses(plain, X, other)


@pytest.mark.parametrize("loss_class", TEMPERATURE_LOSSES)
def test_errors_name_the_class_that_was_called(loss_class: Any) -> None:
    for arguments, options in (((), {}), ((0.1,), {"temprature": 1}), ((0.1, 0.2), {})):
        with pytest.raises(TypeError, match=loss_class.__name__):
            loss_class(*arguments, **options)


@pytest.mark.parametrize("value", ["yes", 1, torch.tensor(True)])
@pytest.mark.parametrize(
    "make",
    [
        *(mb.ClipLoss, mb.SigLipLoss, mb.DistillClipLoss),
        *(lambda c=c, **n: c(0.1, **n) for c in TEMPERATURE_LOSSES),
        *(matryoshka, lambda **n: pairs(("a", "b"), **n)),
    ],
)
def test_a_flag_is_a_flag(make: Any, value: Any) -> None:
    with pytest.raises(TypeError, match="normalize: expected True"):
        make(normalize=value)
