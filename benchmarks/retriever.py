"""A retriever in sentence-transformers' trainer, with its cached ranking loss and with megabatch's.

    python benchmarks/retriever.py --output benchmarks/results/retriever.json

Words and definitions of WordNet, the 40,744 pairs that come with timm; a BERT of MiniLM's size from
random weights, with a tokenizer of these texts. Both contenders start from the same weights, take
the same batches, ours in order of the texts' lengths, and are evaluated before and after by the
library's own evaluator on pairs that were never seen. Losses are compared step by step. Mini-batch
sizes are `--mini-batch-size` texts or, for both, `--mini-batch-tokens` tokens without the padding.
By torchrun each process takes its share of a batch, with `gather_across_devices`. `--smallest` runs
a tiny model on the CPU, which only shows that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, TrainerCallback

from machinery.definitions import words_and_definitions
from megabatch.benchmarking import memory, records
from megabatch.integrations.sentence_transformers import MegabatchRankingLoss

HELD_OUT = 500
#: As torchrun has them.
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
#: (layers, width, heads) by name.
SIZES = {"tiny": (1, 64, 4), "minilm": (6, 384, 12), "bert-base": (12, 768, 12)}
CONTENDERS = {
    "sentence-transformers": losses.CachedMultipleNegativesRankingLoss,
    "megabatch": MegabatchRankingLoss,
}


@dataclass(frozen=True)
class Record:
    """One run."""

    contender: str
    device: str
    n_devices: int
    dtype: str
    b: int
    d: int
    model: str
    mini_batch_size: int
    mini_batch_tokens: int | None
    steps: int
    seconds: float  #: a step's, median after the first two
    loop_seconds: float  #: from a step's end to the next one's: with texts read and tokenized
    pairs_a_second: float
    extra_bytes: int  #: peak above what was in use before training
    losses: tuple[float, ...]
    loss_difference: float | None  #: largest of all steps, relative to the first contender's
    #: distance of the last weights from the first contender's, by how far these moved
    weight_difference: float | None
    recall_before: float  #: at 1, of 500 words among as many definitions
    recall_after: float


class Clock(TrainerCallback):  # type: ignore[misc]
    """The time of each step and its logged loss."""

    def __init__(self, device: str) -> None:
        self.device, self.begun = device, 0.0
        self.seconds: list[float] = []
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begun = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(self._now())
        self.seconds.append(self.ends[-1] - self.begun)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            self.losses.append(float(logs["loss"]))

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    options = arguments()
    pairs = words_and_definitions()
    found: list[tuple[Record, Tensor]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = random_bert(options.model, pairs, Path(folder) / "bert")
        for name in options.contenders:
            found.append(run(name, model, pairs, options, folder, found[:1]))
            if RANK == 0:
                print(found[-1][0], flush=True)
                made = [record for record, _ in found]
                records.write(options.output, records.command_line(options.output), made)


def random_bert(size: str, pairs: list[tuple[str, str]], folder: Path) -> Path:
    """Write a BERT with random weights and a tokenizer of these texts."""
    folder.mkdir()
    tokenizer = BertWordPieceTokenizer()
    texts = [text for pair in pairs for text in pair]
    tokenizer.train_from_iterator(texts, vocab_size=30522, show_progress=False)
    tokenizer.save(str(folder / "words.json"))
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "words.json"), pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    layers, width, heads = SIZES[size]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=128,
        # Dropout would draw other numbers for a text in another order, and losses would differ.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def run(
    name: str,
    folder: Path,
    pairs: list[tuple[str, str]],
    options: argparse.Namespace,
    output: str,
    first: list[tuple[Record, Tensor]],
) -> tuple[Record, Tensor]:
    """Train one contender from the weights in a folder; its record and last weights."""
    width = SIZES[options.model][1]
    model = SentenceTransformer(
        modules=[Transformer(str(folder)), Pooling(width)], device=options.device
    )
    held_out, train = pairs[:HELD_OUT], pairs[HELD_OUT:]
    ids = [str(i) for i in range(len(held_out))]
    queries, corpus = (dict(zip(ids, side, strict=True)) for side in zip(*held_out, strict=True))
    evaluator = InformationRetrievalEvaluator(queries, corpus, {i: {i} for i in ids})
    before, start = evaluator(model)["cosine_recall@1"], weights(model)
    clock = Clock(options.device)
    trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            output_dir=output,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size // RANKS,
            learning_rate=options.lr,
            warmup_steps=max(1, options.steps // 10),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=options.device == "cpu",
            ddp_backend={"cpu": "gloo", "cuda": "nccl"}[options.device] if RANKS > 1 else None,
            bf16=options.device == "cuda",
        ),
        train_dataset=Dataset.from_dict(
            {"anchor": [word for word, _ in train], "positive": [text for _, text in train]}
        ),
        loss=CONTENDERS[name](model, **mini_batches(options)),
        callbacks=[clock],
    )
    extra = memory.extra_bytes(trainer.train, options.device)
    seconds = statistics.median(clock.seconds[2:] or clock.seconds)
    loops = [end - before for before, end in itertools.pairwise(clock.ends)]
    values = clock.losses
    theirs = first[0][0].losses if first else values
    difference = max(abs(a - b) / abs(b) for a, b in zip(values, theirs, strict=True))
    last = weights(model)
    their_last = first[0][1] if first else last
    moved = float((last - their_last).norm() / (their_last - start).norm())
    record = Record(
        contender=name,
        device=options.device,
        n_devices=RANKS,
        dtype="bfloat16" if options.device == "cuda" else "float32",
        b=options.batch_size,
        d=width,
        model=options.model,
        mini_batch_size=options.mini_batch_size,
        mini_batch_tokens=options.mini_batch_tokens,
        steps=options.steps,
        seconds=seconds,
        loop_seconds=statistics.median(loops[1:] or loops),
        pairs_a_second=options.batch_size / seconds,
        extra_bytes=extra,
        losses=tuple(values),
        loss_difference=difference if first else None,
        weight_difference=moved if first else None,
        recall_before=before,
        recall_after=evaluator(model)["cosine_recall@1"],
    )
    return record, last


def weights(model: SentenceTransformer) -> Tensor:
    """All parameters in one vector, float64, on the CPU."""
    return torch.cat([p.detach().double().cpu().flatten() for p in model.parameters()])


def mini_batches(options: argparse.Namespace) -> dict[str, Any]:
    """The losses' arguments that divide a batch, and join those of several processes."""
    given: dict[str, Any] = {"mini_batch_size": options.mini_batch_size}
    if RANKS > 1:
        given["gather_across_devices"] = True
    if options.mini_batch_tokens is None:
        return given
    return {**given, "mini_batch_num_tokens": options.mini_batch_tokens}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/retriever.json"))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=SIZES, default="minilm")
    parser.add_argument("--batch-size", type=int, default=32768)
    parser.add_argument("--mini-batch-size", type=int, default=1024)
    parser.add_argument("--mini-batch-tokens", type=int, help="needs sentence-transformers 6")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--smallest", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    if options.smallest:
        options.device, options.model = "cpu", "tiny"
        options.batch_size, options.mini_batch_size, options.steps = 256, 64, 3
    return options


if __name__ == "__main__":
    main()
