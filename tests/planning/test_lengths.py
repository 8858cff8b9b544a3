"""The tokens of micro-batches whose texts are in order of length."""

from megabatch.data.pairs import BadSample, Pair
from megabatch.planning.lengths import TextLengths, sampled_lengths


def test_a_micro_batch_has_the_tokens_of_its_longest_text():
    lengths = TextLengths({"text": [3, 30, 9, 20]})
    assert lengths.widths("text", 77, rows=4, size=1) == [32, 24, 16, 8]
    assert lengths.widths("text", 77, rows=4, size=2) == [32, 16]
    assert lengths.widths("text", 26, rows=4, size=3) == [26, 8]  # at most what the model takes
    assert lengths.widths("image", 77, rows=4, size=2) == [77, 77]
    assert lengths.range("text", 77) == (8, 32)
    assert lengths.range("image", 50) == (50, 50)


def test_a_sample_stands_for_a_batch_of_any_size():
    lengths = TextLengths({"text": [40] + [10] * 9})
    assert lengths.widths("text", 77, rows=1000, size=100) == [40] + [16] * 9
    assert lengths.widths("text", 77, rows=5, size=1) == [40] + [16] * 4


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
