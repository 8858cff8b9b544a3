"""Write pairs with hard negatives: which definition belongs to this name?

Names and definitions are those of the WordNet synsets that come with timm. The negatives of a name
are the definitions that share most words with the right one (by TF-IDF). The folder gets
`train.jsonl`, `test.jsonl` without negatives, and `bert`, a random encoder with its tokenizer.
Needs megabatch[train,hf].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from wordnet import glosses, save_tiny_bert

import megabatch as mb

HELD_OUT, NEGATIVES = 500, 4


def hard_negatives(definitions: list[str]) -> list[list[str]]:
    """The definitions nearest to each, without itself."""
    words = TfidfVectorizer(max_features=4000, stop_words="english").fit_transform(definitions)
    rows = torch.tensor(words.toarray(), dtype=torch.float32)
    ids = torch.arange(len(rows))
    _, nearest = mb.similarity.topk(rows, rows, NEGATIVES, ids=(ids, ids))
    return [[definitions[i] for i in row] for row in nearest.tolist()]


def main() -> None:
    """Write both tables and the encoder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/wordnet"))
    parser.add_argument("--count", type=int, default=8000, help="synsets for training")
    options = parser.parse_args()
    if options.count <= NEGATIVES:
        parser.error(f"--count: expected more than {NEGATIVES}, got {options.count}")

    torch.manual_seed(0)
    names, definitions = (texts[: HELD_OUT + options.count] for texts in glosses())
    save_tiny_bert(names + definitions, options.output / "bert")
    pairs = [{"query": n, "positive": d} for n, d in zip(names, definitions, strict=True)]
    negatives = hard_negatives(definitions[HELD_OUT:])
    train = [p | {"negatives": n} for p, n in zip(pairs[HELD_OUT:], negatives, strict=True)]
    for name, rows in {"train": train, "test": pairs[:HELD_OUT]}.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (options.output / f"{name}.jsonl").write_text(lines)
    print(json.dumps(train[0], indent=2))


if __name__ == "__main__":
    main()
