"""The kernels of late interaction against dense float64."""

from __future__ import annotations

import pytest
import torch

from megabatch import similarity
from tests.similarity import dense
from tests.similarity.triton import DEVICE, GPU, HALVES, MARKS
from tests.similarity.triton.test_softmax import both, check

pytest.importorskip("triton")
from megabatch.similarity.triton import maxsim

pytestmark = MARKS

#: Queries, their tokens, documents, their tokens, width: pieces of a query, of a document, and
#: more than a tile of each.
SHAPES = [(5, 3, 7, 11, 8), (3, 40, 4, 70, 17)]
if GPU:
    SHAPES += [(33, 32, 40, 256, 128), (300, 20, 90, 33, 96), (20, 130, 9, 700, 256)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(
    shape: tuple[int, ...], saved: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, queries, n, documents, d = shape
    x = torch.nn.functional.normalize(torch.randn(m, queries, d), dim=2).to(DEVICE, dtype)
    y = torch.nn.functional.normalize(torch.randn(n, documents, d), dim=2).to(DEVICE, dtype)
    if not saved:
        monkeypatch.setattr(maxsim.MaxSimKernelTiles, "saved_numbers", lambda *_: 0)
        monkeypatch.setattr(maxsim, "BLOCK", 4)  # several blocks
    mine, theirs = both(x, y, scale=0.9)
    common = {"col_lengths": torch.randint(1, documents + 1, (n,)).to(DEVICE)}
    ids = torch.arange(m).to(DEVICE), torch.arange(n).to(DEVICE)
    weight = torch.rand(m).to(DEVICE)
    ours = similarity.split_logsumexp(*mine, ids=ids, row_weight=weight, **common)
    truth = dense.split_logsumexp(*theirs, ids=ids, row_weight=weight.double(), **common)
    check(ours, truth, mine, theirs)


def test_topk() -> None:
    """Whole numbers, whose sums are exact; one document has no token."""
    x, y = (torch.randint(-2, 3, (n, k, 9)).to(DEVICE, torch.float16) for n, k in ((5, 3), (7, 11)))
    lengths = torch.arange(7).to(DEVICE)
    scores, _ = similarity.topk(x, y, 7, col_lengths=lengths)
    exact = dense.logits(x.double(), y.double(), col_lengths=lengths)
    assert torch.equal(scores.double(), exact.topk(7).values)


@pytest.mark.parametrize(
    ("case", "sides"),
    [("ids", "both"), ("paired", "rows"), ("ceiling", "both"), ("none", "both")],
)
def test_masks(case: str, sides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks, on a GPU of several tiles."""
    m, block = (300, 256) if GPU else (5, 4)
    monkeypatch.setattr(maxsim.MaxSimKernelTiles, "_block_shape", lambda _: (m, block))
    x, y = (torch.randn(m, tokens, 16).div(4).to(DEVICE, torch.float16) for tokens in (3, 5))
    mine, theirs = both(x, y, scale=0.7)
    options = {}
    if case in ("ids", "paired"):
        ids = torch.randint(-1, m // 2, (m,)).to(DEVICE)
        options = {"ids": (ids, ids.flip(0) if case == "ids" else ids)}
        options["positives"] = "paired" if case == "paired" else "ids"
    if case == "ceiling":  # halfway between two logits, which rounding does not reach
        ordered = dense.logits(*theirs).detach().sort(1).values
        options["ceiling"] = ordered[:, m // 2 : m // 2 + 2].mean(1).float().to(DEVICE)
    if case == "none":  # a matrix in which no pair is positive
        own_ids = torch.arange(m, device=DEVICE)
        truth = dense.split_logsumexp(*theirs, ids=(own_ids, own_ids + m))
        ours = [(side,) for side in similarity.logsumexp(*mine, sides=sides)]
        truth = [side[:1] for side in truth]
    else:
        ours = similarity.split_logsumexp(*mine, sides=sides, **options)
        truth = dense.split_logsumexp(*theirs, **options)
    count = 2 if sides == "both" else 1
    check(ours[:count], truth[:count], mine, theirs)


def test_ties_nan_and_documents_of_whole_tiles() -> None:
    # Small integers: products of equal tokens are equal in whatever order they are added up.
    x, y = (torch.randint(-2, 3, (2, n, 16)) for n in (16, 1))
    y = y.repeat(1, 128, 1)
    x, y = (t.to(DEVICE, torch.float16).requires_grad_() for t in (x, y))
    similarity.logsumexp(x, y)[0].sum().backward()
    assert y.grad[:, 0].any()
    assert not y.grad[:, 1:].any()
    with torch.no_grad():
        y[1, 77, 3] = torch.nan
    rows, columns = similarity.logsumexp(x, y)
    assert rows.isnan().all()
    assert columns[1].isnan()


def test_pieces_waste_few_tokens() -> None:
    found = {tokens: maxsim.piece_of(tokens) for tokens in (1, 32, 48, 100, 130, 256)}
    assert found == {
        1: (16, 16),
        32: (32, 32),
        48: (16, 48),
        100: (16, 112),
        130: (16, 144),
        256: (128, 256),
    }
