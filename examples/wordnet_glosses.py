"""sentence-transformers' own trainer with a large batch: which definition belongs to this name?

Real data: names and definitions of the 21,844 WordNet synsets that come with timm. A tiny BERT from
scratch, batches of 512 pairs in mini-batches of 128; recall before and after 100 steps, which
take minutes on a CPU, by the library's evaluator on pairs that were never seen. Needs
sentence-transformers, accelerate, datasets and timm beside megabatch.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from megabatch.integrations.sentence_transformers import MegabatchRankingLoss

HELD_OUT = 500


def glosses() -> tuple[list[str], list[str]]:
    """Names and definitions of synsets, in a random order that is the same each time."""
    timm = importlib.util.find_spec("timm")
    if timm is None or timm.origin is None:
        raise ImportError("the data come with timm: pip install timm")
    folder = Path(timm.origin).parent / "data" / "_info"
    names, definitions = (
        dict(line.split("\t") for line in file.read_text().splitlines())
        for file in (
            folder / "imagenet_synset_to_lemma.txt",
            folder / "imagenet_synset_to_definition.txt",
        )
    )
    synsets = sorted(names)
    order = torch.randperm(len(synsets), generator=torch.Generator().manual_seed(0)).tolist()
    return [names[synsets[i]] for i in order], [definitions[synsets[i]] for i in order]


def tiny_bert(texts: list[str], folder: Path) -> SentenceTransformer:
    """A random BERT of one layer with a tokenizer of these texts."""
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=8000, show_progress=False)
    folder.mkdir()
    tokenizer.save(str(folder / "words.json"))
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "words.json"), pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(64)], device="cpu")


def main() -> None:
    """Train, and print recall before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    names, definitions = glosses()
    train = Dataset.from_dict({"anchor": names[HELD_OUT:], "positive": definitions[HELD_OUT:]})
    ids = [str(i) for i in range(HELD_OUT)]
    evaluator = InformationRetrievalEvaluator(
        queries=dict(zip(ids, names[:HELD_OUT], strict=True)),
        corpus=dict(zip(ids, definitions[:HELD_OUT], strict=True)),
        relevant_docs={i: {i} for i in ids},
        write_csv=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_bert(names + definitions, Path(folder) / "bert")
        before = evaluator(model)["cosine_recall@1"]
        trainer = SentenceTransformerTrainer(
            model,
            SentenceTransformerTrainingArguments(
                output_dir=folder,
                max_steps=steps,
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
    print(f"recall@1: {before:.3f} before, {evaluator(model)['cosine_recall@1']:.3f} after")


if __name__ == "__main__":
    main()
