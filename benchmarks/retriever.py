"""A retriever in sentence-transformers' trainer, with its cached loss and ours, and in our trainer.

    python benchmarks/retriever.py --output benchmarks/results/retriever.json

Words and definitions of WordNet, the 40,744 pairs that come with timm; a BERT of MiniLM's size from
random weights, with a tokenizer of these texts. Both contenders start from the same weights and
take the same batches, tokenized once before, ours in order of the texts' lengths. `--compile`
compiles their encoder. Losses are compared step by step; every `--every` steps, 2,000 pairs that
were never seen give recall@1 and the library's loss of one batch of them. Mini-batch sizes are
`--mini-batch-size` texts or, for both, `--mini-batch-tokens` tokens without the padding. Of these
and of `--lr` several are tried in turn: to report is the rate with the least loss of unseen pairs
after a short run with the library's own loss.

`trainer` is `Trainer.train_step` of megabatch on the same tokens, with `--loss infonce` and its own
choice of micro-batches and kept activations. Its scale is learnt and its learning rate decays
otherwise, so only its first loss is compared.

`--smallest` trains a tiny model on 4,000 pairs on the CPU, which only shows that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
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

HELD_OUT = 2000
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
    lr: float
    steps: int
    seconds: float  #: a step's, median after the first two
    all_seconds: tuple[float, ...]
    pairs_a_second: float
    extra_bytes: int  #: peak above what was in use before training
    losses: tuple[float, ...]
    #: after so many steps: recall@1 of held-out words among as many definitions, and their loss
    curve: tuple[tuple[int, float, float], ...]
    #: largest of all steps, relative to the first contender's; of the trainer the first step's
    loss_difference: float | None
    compiled: bool
    equal_tokens: bool = False  #: of the trainer: its micro-batches, not equal rows
    #: of the trainer, and of a column in the library's trainer with our loss: those encoded once
    kept_micro_batches: int | None = None


class Course(TrainerCallback):  # type: ignore[misc]
    """The times and losses of a training's steps, and held-out scores every so many steps.

    score: gives recall@1 and the loss.
    """

    def __init__(self, device: str, every: int, score: Callable[[], tuple[float, float]]) -> None:
        self.device, self.every, self.score = device, every, score
        self.begun = 0.0
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.curve: list[tuple[int, float, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.curve:
            self.curve.append((0, *self.score()))
        self.begun = self.now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(self.now() - self.begun)
        if len(self.seconds) % self.every == 0:
            self.curve.append((len(self.seconds), *self.score()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            self.losses.append(float(logs["loss"]))

    def now(self) -> float:
        """Seconds, when the device has done its work."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Tokens:
    """The model's tokens of these texts, made once: no step waits for the tokenizer."""

    def __init__(self, model: SentenceTransformer, texts: Sequence[str]) -> None:
        made = model.preprocess(texts)
        self.ids, self.mask = made["input_ids"], made["attention_mask"]
        self.row = {text: i for i, text in enumerate(texts)}

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, Tensor]:
        rows = torch.tensor([self.row[text] for text in texts])
        longest = int(self.mask[rows].sum(1).max())
        return {"input_ids": self.ids[rows, :longest], "attention_mask": self.mask[rows, :longest]}


def main() -> None:
    options = arguments()
    pairs = words_and_definitions()[: options.pairs]
    found: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        bert = random_bert(options.model, pairs, Path(folder) / "bert")
        for name, tokens, lr in itertools.product(
            options.contenders, options.mini_batch_tokens, options.lr
        ):
            one = argparse.Namespace(**{**vars(options), "mini_batch_tokens": tokens, "lr": lr})
            first = next((other for other in found if other.lr == lr), None)
            try:
                found.append(run(name, bert, pairs, one, folder, first))
            except torch.OutOfMemoryError as error:
                print(f"{name}, {tokens} tokens: {memory.reason(error)}", flush=True)
                continue
            print(shown(found[-1]), flush=True)
            records.write(options.output, records.command_line(options.output), found)


def shown(record: Record) -> str:
    """A record in one line."""
    size = record.mini_batch_tokens or record.mini_batch_size
    steps, recall, loss = record.curve[-1]
    return (
        f"{record.model} {record.contender}{' compiled' if record.compiled else ''}, {size} at a "
        f"time, rate {record.lr:g}: {record.seconds:.3f} s, {record.extra_bytes / 2**30:.1f} GiB; "
        f"after {steps} steps: held-out loss {loss:.4f}, recall@1 {recall:.1%}"
    )


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
    first: Record | None,
) -> Record:
    """Train one contender from the weights in a folder."""
    torch._dynamo.reset()
    width = SIZES[options.model][1]
    model = SentenceTransformer(
        modules=[Transformer(str(folder)), Pooling(width)], device=options.device
    )
    held_out, train = pairs[:HELD_OUT], pairs[HELD_OUT:]
    course = Course(options.device, options.every, lambda: held_out_score(model, held_out))
    if name in LOSSES:
        if options.compile:
            encoder: Any = model[0].auto_model
            torch._dynamo.config.recompile_limit = 64  # 8 are too few for small mini-batches
            # The library calls `forward` itself, so `encoder.compile()` would have no effect.
            encoder.forward = torch.compile(encoder.forward, dynamic=True)
        trainer = library_trainer(model, LOSSES[name], train, options, output)
        trainer.add_callback(course)
        done: dict[str, Any] = {
            "extra_bytes": memory.extra_bytes(trainer.train, options.device),
            "mini_batch_size": options.mini_batch_size,
            "mini_batch_tokens": options.mini_batch_tokens,
            "compiled": options.compile,
            "kept_micro_batches": kept(LOSSES[name], options).get("kept_mini_batches"),
        }
    else:
        done = by_trainer(model, folder, train, course, options, output)
    seconds = statistics.median(course.seconds[2:] or course.seconds)
    compared = options.steps if name in LOSSES else 1
    both = zip(course.losses, first.losses if first else course.losses, strict=True)
    difference = max(abs(a - b) / abs(b) for a, b in itertools.islice(both, compared))
    return Record(
        contender=name,
        device=options.device,
        n_devices=1,
        dtype="bfloat16" if options.device == "cuda" else "float32",
        b=options.batch_size,
        d=width,
        model=options.model,
        lr=options.lr,
        steps=options.steps,
        seconds=seconds,
        all_seconds=tuple(course.seconds),
        pairs_a_second=options.batch_size / seconds,
        losses=tuple(course.losses),
        curve=tuple(course.curve),
        loss_difference=difference if first else None,
        equal_tokens=name == "trainer",
        **done,
    )


def held_out_score(model: SentenceTransformer, pairs: list[tuple[str, str]]) -> tuple[float, float]:
    """Recall@1 of the pairs' second texts among all of them, and the library's ranking loss."""
    first, second = (
        model.encode(list(side), batch_size=256, convert_to_tensor=True, normalize_embeddings=True)
        for side in zip(*pairs, strict=True)
    )
    logits, target = 20 * first @ second.T, torch.arange(len(pairs), device=first.device)
    recall = (logits.argmax(1) == target).float().mean()
    return recall.item(), F.cross_entropy(logits, target).item()


def library_trainer(
    model: SentenceTransformer,
    loss: type[torch.nn.Module],
    train: list[tuple[str, str]],
    options: argparse.Namespace,
    output: str,
) -> SentenceTransformerTrainer:
    """The library's trainer."""
    tokens = Tokens(model, [text for pair in train for text in pair])
    limit = options.mini_batch_tokens  # needs sentence-transformers 6
    budget = {} if limit is None else {"mini_batch_num_tokens": limit}
    return SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            output_dir=output,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.lr,
            warmup_steps=max(1, options.steps // 10),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_drop_last=True,  # the epoch's last batch would be a fraction of one
            use_cpu=options.device == "cpu",
            bf16=options.device == "cuda",
        ),
        train_dataset=Dataset.from_dict(
            {"anchor": [word for word, _ in train], "positive": [text for _, text in train]}
        ),
        loss=loss(model, mini_batch_size=options.mini_batch_size, **budget, **kept(loss, options)),
        data_collator=SentenceTransformerDataCollator(preprocess_fn=tokens),
    )


def kept(loss: type[torch.nn.Module], options: argparse.Namespace) -> dict[str, int]:
    """Arguments of megabatch's loss alone."""
    own = loss is LOSSES["megabatch"]
    return {"kept_mini_batches": options.kept_mini_batches} if own else {}


def by_trainer(
    model: SentenceTransformer,
    folder: Path,
    train: list[tuple[str, str]],
    course: Course,
    options: argparse.Namespace,
    output: str,
) -> dict[str, Any]:
    """Train by megabatch's trainer, on the library's batches, and copy the weights to the model.

    Returns the fields of the record that `run` does not know.
    """
    batches = token_batches(
        library_trainer(model, LOSSES["megabatch"], train, options, output), options.steps
    )
    config = TrainConfig(
        model=f"hf:{folder}",
        loss="infonce",
        global_batch_size=options.batch_size,
        lr=options.lr,
        warmup=max(1, options.steps // 10),
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
    score = course.score

    def copied_score() -> tuple[float, float]:
        encoder = towers.module.visual.encoder.state_dict()
        absent, _ = model[0].auto_model.load_state_dict(encoder, strict=False)
        assert all(name.startswith("pooler.") for name in absent)  # of another task
        return score()

    def steps() -> None:
        for batch in batches:
            course.on_step_begin()
            course.losses.append(trainer.train_step(batch)["loss"])
            course.on_step_end()
        copied_score()

    course.score = copied_score
    return {
        "extra_bytes": memory.extra_bytes(steps, options.device),
        "mini_batch_size": trainer.division.rows,
        "mini_batch_tokens": None,
        "compiled": bool(config.torchcompile),
        "kept_micro_batches": trainer.division.kept,
    }


def token_batches(trainer: SentenceTransformerTrainer, count: int) -> list[Batch]:
    """The tokens of the first batches that the library's trainer would take."""
    batches = []
    for batch in itertools.islice(itertools.cycle(trainer.get_train_dataloader()), count):
        features, _ = trainer.collect_features(batch)
        first, second = (side["input_ids"].cpu() for side in features)
        batches.append(Batch(first, second, torch.arange(len(first))))
    return batches


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/retriever.json"))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=SIZES, default="minilm")
    parser.add_argument("--batch-size", type=int, default=32768)
    parser.add_argument("--mini-batch-size", type=int, default=1024)
    parser.add_argument("--mini-batch-tokens", type=int, nargs="+", default=[None])
    parser.add_argument(
        "--kept-mini-batches", type=int, default=0, help="of our loss, in each column"
    )
    parser.add_argument("--compile", action="store_true", help="the library's encoder, too")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--every", type=int, default=10, help="steps between two scores")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-4])
    parser.add_argument("--smallest", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    options.pairs = None
    if options.smallest:
        options.device, options.model = "cpu", "tiny"
        options.batch_size, options.mini_batch_size, options.steps = 256, 64, 3
        options.every, options.pairs = 2, 2 * HELD_OUT
    return options


if __name__ == "__main__":
    main()
