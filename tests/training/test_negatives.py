"""Hard negatives from a table: through the loader, the towers and the loss, and in whole runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.data import Batch, PairLoader, open_pairs
from megabatch.errors import UsageError
from megabatch.training import TrainConfig, train
from tests.export.runs import change_json
from tests.models.tiny_bert import save_tiny_bert
from tests.training.runs import logged, losses, weights

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny text encoder without dropout, and 24 pairs with three negatives each, but for one."""
    folder = tmp_path_factory.mktemp("negatives")
    without = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    change_json(save_tiny_bert(folder / "bert") / "config.json", **without)
    words = [f"{LETTERS[i % 8]} {LETTERS[i // 8]}" for i in range(24)]
    rows = [
        {"query": w, "positive": w[::-1], "negatives": [f"{w} {e}" for e in "fgh"][: 3 - (i == 5)]}
        for i, w in enumerate(words)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(folder: Path, output: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=f"hf:{folder / 'bert'}",
        train_data=str(folder / "pairs.jsonl"),
        output=output,
        global_batch_size=8,
        micro_batch_size=3,
        steps=5,
        precision="fp32",
        device="cpu",
        plan="off",
        loss="infonce",
        hard_negatives=2,
    )
    return replace(config, **changes)


def loader_of(folder: Path, **options: Any) -> PairLoader:
    return PairLoader(
        open_pairs(str(folder / "pairs.jsonl"), negatives=True),
        batch_size=23,
        transform=lambda text: torch.zeros(1),
        tokenizer=lambda texts: torch.tensor([[*text.encode()[:5].ljust(5)] for text in texts]),
        seed=0,
        **{"negatives": 2, **options},
    )


def texts_of(batch: Batch) -> list[list[str]]:
    return [[bytes(t.tolist()).decode().rstrip() for t in row.unbind(1)] for row in batch.texts]


@pytest.mark.parametrize("loss", ["infonce", "maxsim"])
def test_a_run_by_tokens_is_one_by_pairs(
    folder: Path, tmp_path: Path, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = config_of(folder, tmp_path / "pairs", loss=loss)
    tokens = replace(pairs, output=tmp_path / "tokens", micro_batch_size="auto", plan="warn")
    tokens = replace(tokens, micro_batch_tokens=40)
    assert train(pairs) == train(tokens) == 0
    out = capsys.readouterr().out
    assert "--micro-batch-tokens 40 cannot be planned: " in out or loss == "maxsim"
    assert "steps of 8 pairs, at most 40 tokens at a time" in out
    found, expected = losses(tokens.output), losses(pairs.output)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found != expected  # other micro-batches


def test_a_batch_has_each_pair_s_own_negatives_others_in_each_epoch(folder: Path) -> None:
    loader = loader_of(folder)
    epochs = [next(iter(loader)) for _ in range(2)]
    for batch in epochs:
        assert batch.texts.shape == (23, 5, 3)
        for positive, *negatives in texts_of(batch):
            assert {n[:3] for n in negatives} == {positive[::-1]}
            ends = [negative[-1] for negative in negatives]
            assert ends == sorted(set(ends))  # two different ones, in the table's order
    assert len({tuple(n) for batch in epochs for _, *n in texts_of(batch)}) > 23
    again = [next(iter(loader_of(folder, workers=w))) for w in (0, 1)]
    assert all(torch.equal(batch.texts, epochs[0].texts) for batch in again)


def test_a_row_with_too_few_is_left_out_and_counted(folder: Path) -> None:
    loader = loader_of(folder, negatives=3)
    (batch,) = loader
    assert 5 not in batch.indices
    assert loader.report() == [
        "skipped 1 x fewer than 3 negatives (first: pairs.jsonl:row 6)",
    ]


def test_sources_without_negatives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--hard-negatives: glyphs has none; expected tables"):
        open_pairs("glyphs", negatives=True)


@pytest.mark.parametrize("loss", ["infonce", "maxsim"])
def test_a_run_with_negatives_resumes_and_differs_from_one_without(
    folder: Path, tmp_path: Path, loss: str
) -> None:
    whole = config_of(folder, tmp_path / "whole", lr_scheduler="const", warmup=0, loss=loss)
    assert train(whole) == 0
    parts = replace(whole, output=tmp_path / "parts", steps=3)
    assert train(parts) == train(replace(parts, steps=5, resume=True)) == 0
    assert weights(parts.output) == weights(whole.output)
    without = replace(whole, output=tmp_path / "without", hard_negatives=0)
    assert train(without) == 0
    first, plain = logged(whole.output)[0]["loss"], logged(without.output)[0]["loss"]
    assert first > plain  # 24 candidates instead of 8
    assert weights(whole.output) != weights(without.output)
