"""Late interaction beside one vector for each text: which function does this sentence describe?

Real data: the functions of Python's standard library and of torch. A query is the first sentence of
a docstring, its document the code without the docstring. Two models of the same small encoder train
for as many steps: one averages a text's vectors (`InfoNCELoss`), the other keeps a vector for each
word (`MaxSimLoss`). Recall is among functions that were never seen. Needs only megabatch; takes two
minutes on a CPU.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb

LIBRARIES = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "testing", "idle_test"}
VOCABULARY = 16_384
QUERY_WORDS, DOCUMENT_WORDS = 16, 64  # at most; further ones are cut off
BATCH = 256
HELD_OUT = 500


def functions() -> Iterator[tuple[str, str]]:
    """Docstrings of functions and methods, and their code without the docstring."""
    for library in LIBRARIES:
        for path in sorted(library.rglob("*.py")):
            if SKIPPED.isdisjoint(path.relative_to(library).parts):
                source = path.read_text(encoding="utf-8")
                yield from functions_of(ast.parse(source), source.split("\n"))


def functions_of(node: ast.Module | ast.ClassDef, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Those of a module or class, with the module's lines."""
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from functions_of(child, lines)
        elif isinstance(child, ast.FunctionDef) and (text := ast.get_docstring(child)):
            first, last = child.body[0].lineno, child.body[0].end_lineno
            code = lines[child.lineno - 1 : first - 1] + lines[last : child.end_lineno]
            yield text, "\n".join(code)


def word_ids(text: str, length: int) -> list[int]:
    """Hashes of the first words, with the parts of a name as words; then zeros."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d", text)[:length]
    ids = [1 + zlib.crc32(word.lower().encode()) % (VOCABULARY - 1) for word in words]
    return ids + [0] * (length - len(ids))


def load_pairs(count: int | None) -> tuple[Tensor, Tensor]:
    """Words of distinct queries (n, 16) and documents (n, 64), in a fixed random order."""
    found = {}
    for text, code in itertools.islice(functions(), count):
        query = word_ids(re.split(r"\.\s|\n\n", text)[0], QUERY_WORDS)
        document = word_ids(code, DOCUMENT_WORDS)
        if query[3] and document[15]:  # long enough to tell functions apart
            found[tuple(query)] = tuple(document)
    queries = {document: query for query, document in found.items()}
    order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(0))
    return torch.tensor([*queries.values()])[order], torch.tensor([*queries])[order]


class WordEncoder(nn.Module):
    """A unit vector for each word, which depends on its neighbours, and the mask of words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 64)
        nn.init.normal_(self.words.weight, std=0.1)
        self.neighbours = nn.Conv1d(64, 64, 3, padding=1)
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, width))

    def vectors(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors (n, length, width), zeros where there is no word, and the mask (n, length)."""
        mask = ids != 0
        x = self.words(ids) * mask[..., None]
        x = x + F.gelu(self.neighbours(x.mT).mT)
        return self.head(x) * mask[..., None], mask

    def forward(self, ids: Tensor) -> Any:
        """Encode."""
        x, mask = self.vectors(ids)
        return F.normalize(x, dim=2), mask


class TextEncoder(WordEncoder):
    """A unit vector for each text: the mean of its words' vectors, scaled."""

    def forward(self, ids: Tensor) -> Any:
        x, _ = self.vectors(ids)
        return F.normalize(x.sum(1))


def train(encoder: nn.Module, loss: nn.Module, pairs: tuple[Tensor, Tensor], steps: int) -> None:
    """Train the encoder of both sides on random batches."""
    step = mb.GradientCache((encoder, encoder), loss, micro_batch_size=128)
    optimizer = torch.optim.AdamW(encoder.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=steps)
    for _ in range(steps):
        batch = torch.randperm(len(pairs[0]))[:BATCH]
        optimizer.zero_grad()
        step(*(side[batch] for side in pairs)).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def recall(encoder: nn.Module, queries: Tensor, documents: Tensor) -> str:
    """Recall@1 and @10 of each query's document among all."""
    x, y, lengths = encoder(queries), encoder(documents), None
    if isinstance(x, tuple):
        (x, _), (y, mask) = x, y
        lengths = mask.sum(1)
    above, equal = mb.similarity.ranks(x, y, torch.arange(len(x)), col_lengths=lengths)
    at_1, at_10 = (((above + equal) < k).double().mean() for k in (1, 10))
    return f"recall@1 {at_1:.3f}, @10 {at_10:.3f}"


def main() -> None:
    """Train both models, and print recall before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", type=int, help="the first so many, instead of all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    queries, documents = load_pairs(options.functions)
    if len(queries) <= HELD_OUT:
        parser.error(f"--functions: expected more, to hold out {HELD_OUT}, got {options.functions}")
    held_out = queries[:HELD_OUT], documents[:HELD_OUT]
    trained = queries[HELD_OUT:], documents[HELD_OUT:]
    torch.manual_seed(options.seed)
    for name, encoder, loss in (
        ("text", TextEncoder(64), mb.InfoNCELoss(0.1, reverse="separate")),
        ("word", WordEncoder(32), mb.MaxSimLoss(0.05, score="mean", directions="both")),
    ):
        before = recall(encoder, *held_out)
        train(encoder, loss, trained, options.steps)
        after = recall(encoder, *held_out)
        print(f"a vector for each {name}: {before} before, {after} after")


if __name__ == "__main__":
    main()
