"""The differences between texts that tokens keep, and those that they lose."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabatch.models.hashing_tokenizer import HashingTokenizer, features

tokenizer = HashingTokenizer()


def tokens(text: str) -> set[int]:
    return set(tokenizer(text)[0].tolist()) - {0}


def test_words_then_pairs_then_trigrams() -> None:
    assert features("Letter EL-2") == [
        *("letter", "el", "2"),
        *("^ letter", "letter el", "el 2", "2 $"),
        *("<^le", "<let", "<ett", "<tte", "<ter", "<er$", "<^el", "<el$"),
    ]


def test_an_unseen_word_shares_pieces_with_known_ones() -> None:
    shared = tokens("canadian syllabics tlhi") & tokens("canadian syllabics tlho")
    assert len(shared) >= 2 + 2 + 18 + 1  # words, pairs, their trigrams, "^tl" of the new word


def test_order_matters_through_pairs() -> None:
    assert tokens("a above b") != tokens("b above a")


def test_case_does_not_matter() -> None:
    assert torch.equal(tokenizer("LATIN Small"), tokenizer("latin small"))


def test_tokens_are_the_same_in_every_process() -> None:
    # Not Python's hash(), which is salted. These numbers must never change: weights depend on them.
    assert tokenizer("el")[0, :5].tolist() == [5583, 3417, 512, 11661, 5488]


def test_a_short_context_keeps_words_first() -> None:
    short = HashingTokenizer(context_length=3)
    assert torch.equal(short("latin small letter a"), tokenizer("latin small letter a")[:, :3])


def test_one_text_and_a_list_and_an_empty_list() -> None:
    assert tokenizer("abc").shape == (1, 64)
    assert tokenizer(["abc", "de"]).shape == (2, 64)
    assert tokenizer([]).shape == (0, 64)
    assert tokenizer("abc").dtype == torch.int64


@pytest.mark.parametrize("text", ["", "   ", "---"])
def test_a_text_without_words_has_one_token_of_its_own(text: str) -> None:
    assert features(text) == ["^ $"]
    assert (tokenizer(text) > 0).sum() == 1


@given(st.text())
def test_any_text_gives_tokens_in_range(text: str) -> None:
    result = tokenizer(text)
    assert result.shape == (1, 64)
    assert ((result >= 0) & (result < 16_384)).all()
    filled = (result[0] > 0).tolist()
    assert filled == sorted(filled, reverse=True)  # padding comes last


@given(
    st.lists(st.text(st.sampled_from("ab é-1,²İß\U0001f600 \n"), max_size=60)), st.integers(1, 80)
)
def test_tokens_are_the_features_hashes(texts: list[str], length: int) -> None:
    found = HashingTokenizer(1000, length)(texts)
    for text, row in zip(texts, found.tolist(), strict=True):
        hashes = [zlib.crc32(feature.encode()) % 999 + 1 for feature in features(text)][:length]
        assert row == hashes + [0] * (length - len(hashes))
