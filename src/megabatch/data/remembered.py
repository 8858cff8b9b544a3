"""What was worked out of captions, kept for the epochs to come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megabatch.data.pairs import ArrayDataset, caption_id


class RememberedTokens:
    """A tokenizer that works out each text once, as far as memory goes; pairs come every epoch.

    limit: bytes of tokens; what the texts themselves take comes on top.
    """

    def __init__(self, tokenizer: Callable[[list[str]], Tensor], limit: int) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self._rows: dict[str, int] = {}  # of _table
        self._table: Tensor | None = None

    def __call__(self, texts: list[str]) -> Tensor:
        """Tokens of these texts, (n, context)."""
        new = [text for text in dict.fromkeys(texts) if text not in self._rows]
        tokens = self.tokenizer(new) if new else None
        if tokens is not None:
            new = self._remember(new, tokens)  # what there is no room for
        assert self._table is not None
        found = self._table[torch.tensor([self._rows.get(text, -1) for text in texts])]
        if new:
            assert tokens is not None
            row_of = {text: row for row, text in enumerate(new, len(tokens) - len(new))}
            others = [at for at, text in enumerate(texts) if text in row_of]
            found[others] = tokens[[row_of[texts[at]] for at in others]]
        return found

    def _remember(self, texts: list[str], tokens: Tensor) -> list[str]:
        """Keep what there is room for; returns the last texts, for which there is none."""
        if self._table is None:
            # At its full size: the system gives memory for what is written only.
            room = max(1, self.limit // max(1, tokens[0].nbytes))
            self._table = tokens.new_empty((room, *tokens.shape[1:]))
        known = len(self._rows)
        kept = min(len(texts), len(self._table) - known)
        self._table[known : known + kept] = tokens[:kept]
        self._rows.update(zip(texts[:kept], range(known, known + kept), strict=True))
        return texts[kept:]

    def places(self, texts: list[str]) -> np.ndarray:
        """Where their tokens are kept, for `at`; int64 (n,), -1 where there was no room."""
        return np.array([self._rows.get(text, -1) for text in texts], dtype=np.int64)

    def at(self, places: np.ndarray) -> Tensor:
        """The tokens that are kept there; whatever it is where a place is -1."""
        assert self._table is not None
        return self._table[torch.from_numpy(places)]


class CaptionsByIndex:
    """Tokens and ids of a data set's captions, by index once they are known.

    Looked up by text in each epoch they would take as long as the images take to be copied, all of
    it in Python, which the threads that give the GPU its work would wait for.
    """

    def __init__(self, dataset: ArrayDataset, tokens: RememberedTokens) -> None:
        self.dataset = dataset
        self._tokens = tokens
        self._places = np.full(len(dataset), -1, dtype=np.int64)
        self._own_ids = getattr(dataset, "ids", None)
        self._ids = np.empty(0 if self._own_ids else len(dataset), dtype=np.int64)

    def __call__(self, indices: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Tokens (n, context) and ids, int64 (n,), of the samples of these indices."""
        places = self._places[indices]
        new = np.flatnonzero(places < 0)
        if len(new) == 0:
            return self._tokens.at(places), self._ids_at(indices)
        captions = self.dataset.texts(indices[new])
        tokens = self._tokens(captions)
        self._places[indices[new]] = self._tokens.places(captions)
        if self._own_ids is None:
            self._ids[indices[new]] = caption_ids(captions)
        if len(new) < len(indices):
            found = self._tokens.at(places)
            found[torch.from_numpy(new)] = tokens
            tokens = found
        return tokens, self._ids_at(indices)

    def _ids_at(self, indices: np.ndarray) -> np.ndarray:
        return self._ids[indices] if self._own_ids is None else self._own_ids(indices)


def caption_ids(captions: Sequence[str]) -> np.ndarray:
    """int64 (n,) from 0 to 2**62, equal for equal captions, in every process and every run."""
    return np.array([caption_id(caption) for caption in captions], dtype=np.int64)
