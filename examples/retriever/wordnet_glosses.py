"""sentence-transformers' own trainer with a large batch: which definition belongs to this name?

Real data: names and definitions of the 21,844 WordNet synsets that come with timm. A tiny BERT from
scratch, batches of 512 pairs in mini-batches of 128; recall before and after 100 steps, which
take minutes on a CPU, by the library's evaluator on pairs that were never seen. Needs
sentence-transformers, accelerate, datasets and timm in addition to megabatch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from wordnet import glosses, save_tiny_bert

from megabatch.integrations.sentence_transformers import MegabatchRankingLoss

HELD_OUT = 500


def main() -> None:
    """Train, and print recall before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--count", type=int, default=21_000, help="synsets for training")
    options = parser.parse_args()

    torch.manual_seed(0)
    names, definitions = (texts[: HELD_OUT + options.count] for texts in glosses())
    train = Dataset.from_dict({"anchor": names[HELD_OUT:], "positive": definitions[HELD_OUT:]})
    ids = [str(i) for i in range(HELD_OUT)]
    evaluator = InformationRetrievalEvaluator(
        queries=dict(zip(ids, names[:HELD_OUT], strict=True)),
        corpus=dict(zip(ids, definitions[:HELD_OUT], strict=True)),
        relevant_docs={i: {i} for i in ids},
        write_csv=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_bert(names + definitions, Path(folder) / "bert")
        transformer = Transformer(str(Path(folder) / "bert"))
        model = SentenceTransformer(modules=[transformer, Pooling(64)], device="cpu")
        before = evaluator(model)["cosine_recall@1"]
        trainer = SentenceTransformerTrainer(
            model,
            SentenceTransformerTrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=512,
                learning_rate=5e-3,
                warmup_steps=5,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=train,
            # It was losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=128).
            loss=MegabatchRankingLoss(model, mini_batch_size=128),
        )
        trainer.train()
    after, chance = evaluator(model)["cosine_recall@1"], 1 / HELD_OUT
    print(f"recall@1: {before:.3f} before, {after:.3f} after, {chance:.3f} by chance")


if __name__ == "__main__":
    main()
