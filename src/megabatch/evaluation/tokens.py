"""Features of texts' tokens, for late interaction, and scores of features of either kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from megabatch.similarity import eager
from megabatch.similarity.matrix import Side
from megabatch.similarity.ranking import Scores


@dataclass(frozen=True)
class Tokens:
    """Features of texts' tokens, one text after the other, without padding.

    features: (t, d); lengths: int64 (n,), each text's number of tokens.
    """

    features: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Features (m, l, d) of these texts, zeros behind their last tokens, and their lengths."""
        lengths, start = self.lengths[rows], (self.lengths.cumsum(0) - self.lengths)[rows]
        place = torch.arange(max(1, int(lengths.max())), device=lengths.device)
        inside = place < lengths[:, None]
        padded = self.features.new_zeros(*inside.shape, self.features.shape[1])
        padded[inside] = self.features[(start[:, None] + place)[inside]]
        return padded, lengths


#: Of queries or of candidates: (n, d), or those of late interaction.
Features: TypeAlias = "Tensor | Tokens"


def scores(x: Features, y: Features, i: slice | Tensor, j: slice | Tensor) -> Tensor:
    """Scores of x[i] against y[j], in float32 (float64 for float64 features).

    Those of tokens are the mean over the query's of the largest product with one of the document's,
    as `--loss maxsim` has them: 0 of a query without tokens, -inf of a document without. Equal
    columns score the same, and equal rows.
    """
    if isinstance(x, Tokens):
        assert isinstance(y, Tokens)  # a model gives both
        (queries, counts), (documents, lengths) = x.padded(i), y.padded(j)
        rows, columns = Side(eager.whole_groups(queries)), Side(documents, lengths=lengths)
        return Scores(rows, columns).whole()[: len(counts)] / counts.clamp(min=1)[:, None]
    assert isinstance(y, Tensor)
    queries, candidates = x[i], y[j]
    s = eager.logits(eager.whole_groups(queries), eager.whole_groups(candidates))
    return s[: len(queries), : len(candidates)]
