"""A retriever in sentence-transformers' trainer, with its cached loss and ours, and in our trainer.

    python benchmarks/retriever.py --output benchmarks/results/retriever.json

Words and definitions of WordNet, the 40,744 pairs that come with timm; a BERT of MiniLM's size from
random weights, with a tokenizer of these texts. Both contenders start from the same weights, take
the same batches, ours in order of the texts' lengths, and are evaluated before and after by the
library's own evaluator on pairs that were never seen. Losses are compared step by step. Mini-batch
sizes are `--mini-batch-size` texts or, for both, `--mini-batch-tokens` tokens without the padding.
By torchrun each process takes its share of a batch, with `gather_across_devices`.

`trainer` is `Trainer.train_step` of megabatch on the same tokens, with `--loss infonce` and its own
choice of micro-batches and kept activations. Its scale is learnt and its learning rate decays
otherwise, so only its first loss is compared, and its weights are not. One process only.

`--smallest` runs a tiny model on the CPU, which only shows that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
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
from megabatch.config.settings import TrainConfig
from megabatch.data import Batch
from megabatch.integrations.sentence_transformers import MegabatchRankingLoss
from megabatch.models import create
from megabatch.training.trainer import Trainer

HELD_OUT = 500
#: This process's rank and the number of ranks, as torchrun sets them.
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
#: (layers, width, heads) by name.
SIZES = {"tiny": (1, 64, 4), "minilm": (6, 384, 12), "bert-base": (12, 768, 12)}
LOSSES = {
    "sentence-transformers": losses.CachedMultipleNegativesRankingLoss,
    "megabatch": MegabatchRankingLoss,
}
CONTENDERS = (*LOSSES, "trainer")


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
    mini_batch_size: int  #: texts, or pairs of the trainer
    mini_batch_tokens: int | None
    steps: int
    seconds: float  #: a step's, median after the first two
    loop_seconds: float  #: from a step's end to the next one's: with texts read and tokenized
    pairs_a_second: float
    extra_bytes: int  #: peak above what was in use before training
    losses: tuple[float, ...]
    #: largest of all steps, relative to the first contender's; of the trainer the first step's
    loss_difference: float | None
    #: distance of the last weights from the first contender's, by how far these moved
    weight_difference: float | None
    recall_before: float  #: at 1, of 500 words among as many definitions
    recall_after: float
    compiled: bool = False  #: of the trainer: its towers
    equal_tokens: bool = False  #: of the trainer: its micro-batches, not equal rows
    kept_micro_batches: int | None = None  #: of the trainer: those encoded once


class Clock(TrainerCallback):  # type: ignore[misc]
    """The time of each step and its logged loss."""

    def __init__(self, device: str) -> None:
        self.device, self.begun = device, 0.0
        self.seconds: list[float] = []
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begun = self.now(self.device)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(self.now(self.device))
        self.seconds.append(self.ends[-1] - self.begun)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            self.losses.append(float(logs["loss"]))

    @staticmethod
    def now(device: str) -> float:
        """Seconds, when the device has done its work."""
        if device == "cuda":
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


@dataclass
class Trained:
    """The results of a training: step times, mini-batches, losses and memory."""

    seconds: list[float]
    loops: list[float]
    losses: list[float]
    extra_bytes: int
    mini_batch_size: int
    mini_batch_tokens: int | None
    compiled: bool = False
    kept: int | None = None


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
    if name in LOSSES:
        done = by_library(library_trainer(model, LOSSES[name], train, options, output), options)
    else:
        done = by_trainer(model, folder, train, options, output)
    seconds = statistics.median(done.seconds[2:] or done.seconds)
    last = weights(model)
    theirs, their_last = (first[0][0].losses, first[0][1]) if first else (done.losses, last)
    compared = len(theirs) if name in LOSSES else 1
    both = zip(done.losses[:compared], theirs[:compared], strict=True)
    difference = max(abs(a - b) / abs(b) for a, b in both)
    moved = float((last - their_last).norm() / (their_last - start).norm())
    record = Record(
        contender=name,
        device=options.device,
        n_devices=RANKS,
        dtype="bfloat16" if options.device == "cuda" else "float32",
        b=options.batch_size,
        d=width,
        model=options.model,
        mini_batch_size=done.mini_batch_size,
        mini_batch_tokens=done.mini_batch_tokens,
        steps=options.steps,
        seconds=seconds,
        loop_seconds=statistics.median(done.loops[1:] or done.loops),
        pairs_a_second=options.batch_size / seconds,
        extra_bytes=done.extra_bytes,
        losses=tuple(done.losses),
        loss_difference=difference if first else None,
        weight_difference=moved if first and name in LOSSES else None,
        recall_before=before,
        recall_after=evaluator(model)["cosine_recall@1"],
        compiled=done.compiled,
        equal_tokens=name == "trainer",
        kept_micro_batches=done.kept,
    )
    return record, last


def library_trainer(
    model: SentenceTransformer,
    loss: type[torch.nn.Module],
    train: list[tuple[str, str]],
    options: argparse.Namespace,
    output: str,
) -> SentenceTransformerTrainer:
    """The library's trainer."""
    return SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            output_dir=output,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size // RANKS,
            learning_rate=options.lr,
            warmup_steps=warm_up(options),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_drop_last=True,  # the epoch's last batch would be a fraction of one
            use_cpu=options.device == "cpu",
            ddp_backend={"cpu": "gloo", "cuda": "nccl"}[options.device] if RANKS > 1 else None,
            bf16=options.device == "cuda",
        ),
        train_dataset=Dataset.from_dict(
            {"anchor": [word for word, _ in train], "positive": [text for _, text in train]}
        ),
        loss=loss(model, **mini_batches(options)),
    )


def by_library(trainer: SentenceTransformerTrainer, options: argparse.Namespace) -> Trained:
    """Train as the library does."""
    clock = Clock(options.device)
    trainer.add_callback(clock)
    extra = memory.extra_bytes(trainer.train, options.device)
    loops = [end - before for before, end in itertools.pairwise(clock.ends)]
    sizes = options.mini_batch_size, options.mini_batch_tokens
    return Trained(clock.seconds, loops, clock.losses, extra, *sizes)


def by_trainer(
    model: SentenceTransformer,
    folder: Path,
    train: list[tuple[str, str]],
    options: argparse.Namespace,
    output: str,
) -> Trained:
    """Train by megabatch's trainer, on the library's batches, and copy the weights to the model."""
    if RANKS > 1:
        raise SystemExit("--contenders trainer: expected one process")
    batches = token_batches(
        library_trainer(model, LOSSES["megabatch"], train, options, output), options.steps
    )
    config = TrainConfig(
        model=f"hf:{folder}",
        loss="infonce",
        global_batch_size=options.batch_size,
        lr=options.lr,
        warmup=warm_up(options),
        precision="bf16" if options.device == "cuda" else "fp32",
        activation_memory="auto",
        torchcompile=options.device == "cuda",
    )
    if options.device == "cpu":
        config = replace(config, micro_batch_size=options.mini_batch_size)
    towers = create(config.model)
    trainer = Trainer(
        config, towers.module, torch.device(options.device), options.steps, lengths=towers.lengths
    )
    seconds, found = [], []

    def steps() -> None:
        for batch in batches:
            begun = Clock.now(options.device)
            found.append(trainer.train_step(batch)["loss"])
            seconds.append(Clock.now(options.device) - begun)

    extra = memory.extra_bytes(steps, options.device)
    encoder = towers.module.visual.encoder.state_dict()
    absent, _ = model[0].auto_model.load_state_dict(encoder, strict=False)
    assert all(name.startswith("pooler.") for name in absent)  # of another task
    rows, kept = trainer.division.rows, trainer.division.kept
    return Trained(seconds, seconds, found, extra, rows, None, bool(config.torchcompile), kept)


def token_batches(trainer: SentenceTransformerTrainer, count: int) -> list[Batch]:
    """The tokens of the first batches that the library's trainer would take."""
    batches = []
    for batch in itertools.islice(itertools.cycle(trainer.get_train_dataloader()), count):
        features, _ = trainer.collect_features(batch)
        first, second = (side["input_ids"].cpu() for side in features)
        batches.append(Batch(first, second, torch.arange(len(first))))
    return batches


def warm_up(options: argparse.Namespace) -> int:
    """Steps of the warm-up."""
    return max(1, int(options.steps // 10))


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
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, 
                        default=list(CONTENDERS if RANKS == 1 else LOSSES))  # fmt: skip
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
