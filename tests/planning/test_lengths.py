"""The tokens of micro-batches whose texts are in order of length."""

import torch

from megabatch import SortedByLength
from megabatch.data.pairs import BadSample, Pair
from megabatch.gradient_cache.feed import divided
from megabatch.planning.micro_batches import TextLengths, sampled_lengths


def test_micro_batches_are_those_of_a_run():
    sample = [3, 30, 9, 20, 1, 17, 9, 8]
    lengths = TextLengths({"text": sample})
    for count in (1, 2, 3, 8):
        for context in (77, 26):  # at most what the model takes
            tokens = torch.zeros(8, context)
            texts = SortedByLength(tokens, torch.tensor(sample).clamp(max=context))
            parts = [one.of("text") for one in divided(8, -(-8 // count), {"text": texts})]
            run = [texts.take(part).numel() for part in parts]
            mean, most = lengths.widths("text", context, 8, count)
            assert mean == sum(run) / 8
            assert most == max(mean, max(run) / -(-8 // count))
            assert lengths.longer("text", context, 8, count) == texts.longer(count)
    assert lengths.widths("image", 77, rows=4, count=2) == (77, 77)
    assert lengths.range("text", 77) == (8, 32)
    assert lengths.range("image", 50) == (50, 50)


def test_a_sample_stands_for_a_batch_of_any_size():
    lengths = TextLengths({"text": [40] + [10] * 9})
    tokens = 3 * 49 * 40 + (6 * 122 + 121) * 16
    assert lengths.widths("text", 77, rows=1000, count=10) == (tokens / 1000, 19.6)
    assert lengths.widths("text", 77, rows=10**9, count=1) == (40, 40)
    # A single length is that of all texts.
    assert TextLengths({"text": (24,)}).longer("text", 77, rows=100, count=10) == 1
    assert TextLengths({"text": (24, 24)}).longer("text", 77, rows=10, count=10) == 77 / 24


def test_lengths_of_the_texts_of_a_data_set(glyph):
    class Words:
        def __len__(self):
            return 30

        def __getitem__(self, index):
            if index == 7:
                raise BadSample("no caption", str(index))
            return Pair("", "word " * (index + 1), str(index))

    found = sampled_lengths(Words(), glyph).samples["text"]
    tokens = glyph.tokenizer(["word " * (i + 1) for i in range(30) if i != 7])
    assert found == glyph.lengths["text"](tokens).tolist()
    assert len(sampled_lengths(Words(), glyph, samples=4).samples["text"]) == 4
