"""The definitions' tokens, as docs/speed.md gives them."""

import open_clip
import torch

from machinery.definitions import captions, length_statistics, tokenized
from megabatch.gradient_cache.by_length import equal_rows
from megabatch.models.padding import up_to_largest
from megabatch.planning.micro_batches import TextLengths, cut


def test_tokens_that_are_encoded_for_a_definition():
    lengths = up_to_largest(tokenized(open_clip.get_tokenizer("ViT-B-32"), captions(4096)))
    found = length_statistics(lengths)
    assert (round(found["mean"]), found["median"], found["p90"]) == (16, 14, 26)
    sample = TextLengths({"text": lengths.tolist()})
    widths = [cut(length, 77) for length in lengths.sort(descending=True).values.tolist()]
    assert round(sum(widths) / 4096) == 19
    for rows, size, equal_tokens, as_many_rows in (
        (4096, 512, 22, 25),
        (4096, 1024, 26, 30),
        (4096, 2048, 35, 40),
        (32768, 2048, 20, 22),  # of which the others are a sample
    ):
        assert round(sample.widths("text", 77, rows, rows // size)[0]) == equal_tokens
        first = (part.start * 4096 // rows for part in equal_rows(rows, size))
        assert round(sum(widths[row] for row in first) * size / rows) == as_many_rows
    unsorted = [cut(int(part.max()), 77) for part in lengths.split(512)]
    assert round(torch.tensor(unsorted, dtype=torch.double).mean().item()) == 55
