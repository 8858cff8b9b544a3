"""What was worked out of captions, kept for the epochs to come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megabatch.data.remembered import CaptionsByIndex, RememberedTokens, caption_ids


@pytest.mark.parametrize("room", [0, 3, 100])
def test_each_text_is_tokenised_once_where_there_is_room(room: int) -> None:
    asked: list[str] = []

    def tokenizer(texts: list[str]) -> torch.Tensor:
        asked.extend(texts)
        return torch.tensor([[int(text), 2**40] for text in texts])

    tokens = RememberedTokens(tokenizer, limit=16 * room)
    for texts in (
        ["5", "2", "5"],
        ["7", "2", "8", "9", "8"],
        ["9", "5", "8", "8", "2"],
        ["2", "5"],
    ):
        assert tokens(texts).tolist() == [[int(text), 2**40] for text in texts]
    if room == 100:
        assert asked == ["5", "2", "7", "8", "9"]
    if room == 3:
        assert asked == ["5", "2", "7", "8", "9", "9", "8"]


class Texts:
    """A data set of which only the captions count."""

    first = "image"

    def __init__(self, captions: list[str]) -> None:
        self.captions = captions
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def arrays(self, indices: Any) -> np.ndarray:
        raise NotImplementedError

    def texts(self, indices: Any) -> list[str]:
        self.asked += list(indices)
        return [self.captions[i] for i in indices]


class Identified(Texts):
    def ids(self, indices: Any) -> np.ndarray:
        return np.asarray(indices) % 3


@pytest.mark.parametrize("room", [0, 3, 100])
@pytest.mark.parametrize("kind", [Texts, Identified])
def test_captions_by_index_are_those_of_the_data_set(kind: type[Texts], room: int) -> None:
    data = kind([str(i % 7) for i in range(20)])
    tokens = RememberedTokens(
        lambda texts: torch.tensor([[int(text), 2**40] for text in texts]), limit=16 * room
    )
    captions = CaptionsByIndex(data, tokens)
    random = np.random.default_rng(0)
    for _ in range(30):
        indices = random.integers(20, size=random.integers(1, 9))
        texts, ids = captions(indices)
        assert texts.tolist() == [[i % 7, 2**40] for i in indices]
        said = [data.captions[i] for i in indices]
        expected = indices % 3 if kind is Identified else caption_ids(said)
        assert np.array_equal(ids, expected)
    if room == 100:  # each once, but where it came twice in the batch that had it first
        assert len(set(data.asked)) == 20
        first = len(data.asked)
        captions(np.arange(20))
        assert len(data.asked) == first
