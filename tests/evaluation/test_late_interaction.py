"""Evaluation by MaxSim: recall without the matrix, and runs of models with features of tokens."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.evaluation import evaluate_run, retrieval
from megabatch.evaluation.config import EvalConfig
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.retrieval import answers_by_ids, answers_by_pairs, figures_and_chance
from megabatch.evaluation.run import open_tasks
from megabatch.evaluation.run_folder import Opened, open_run
from megabatch.evaluation.tokens import Tokens
from megabatch.models.padding import counted
from tests.evaluation.page import Page
from tests.evaluation.test_own_data import by_the_whole_matrix
from tests.evaluation.test_retrieval import by_rights
from tests.models.tiny_bert import save_tiny_bert


def some_tokens(n: int, longest: int, d: int = 8) -> Tokens:
    lengths = torch.randint(0, longest + 1, (n,))
    return Tokens(torch.nn.functional.normalize(torch.randn(int(lengths.sum()), d), dim=1), lengths)


def dense(x: Tensor, y: Tensor) -> Tensor:
    """The scores of padded tokens, (m, n), in float64."""
    products = torch.einsum("ild,jkd->ijlk", x.double(), y.double())
    largest = products.masked_fill(~counted(y)[:, None], -torch.inf).amax(3)
    queries = counted(x)
    sums = largest.masked_fill(~queries[:, None], 0).sum(2) / queries.sum(1).clamp(min=1)[:, None]
    return sums.masked_fill(~counted(y).any(1), -1e9)  # unlike -inf, it can be multiplied by 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_figures_of_tokens_equal_the_dense_expression(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of right answers; texts of 0 to 9 tokens, padded block by block."""
    x, y = (
        replace(t, features=t.features.to(dtype)) for t in (some_tokens(90, 5), some_tokens(70, 9))
    )
    rows, columns = torch.randint(0, 85, (120,)), torch.randint(0, 70, (120,))
    right = torch.zeros(90, 70, dtype=torch.bool).index_put((rows, columns), torch.tensor(True))
    answers = answers_by_pairs(*right.nonzero().unbind(1), 90, 70)
    whole, (found, _) = (
        dense(x.padded(slice(90))[0], y.padded(slice(70))[0]),
        (figures_and_chance(x, y, answers, ks=(1, 5, 10))),
    )
    rights, back = ([r.nonzero().flatten().tolist() for r in m] for m in (right, right.T))
    assert found == pytest.approx(by_rights(whole, torch.eye(70), rights, back, [1, 5, 10]))
    monkeypatch.setattr(retrieval, "_CPU_TEXTS", 16)
    assert figures_and_chance(x, y, answers, ks=(1, 5, 10))[0] == found


def test_a_collapsed_model_scores_chance() -> None:
    token = torch.nn.functional.normalize(torch.randn(1, 64), dim=1)
    x, y = (Tokens(token.repeat(n * k, 1), torch.full((n,), k)) for n, k in ((301, 3), (283, 7)))
    answers = answers_by_ids(torch.arange(301) % 283, torch.arange(283))
    found, chance = figures_and_chance(x, y, answers, ks=(1, 5))
    assert found == pytest.approx(chance, abs=1e-12)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[list[str]]]:
    """The folder of a run of 4 steps that was evaluated every 2; its held-out pairs, and these."""
    folder = tmp_path_factory.mktemp("tokens")
    draw = random.Random(0)
    words = [" ".join(draw.choices("abcdefg", k=1 + i % 8)) for i in range(40)]
    pairs = [[words[i % 33], f"{words[(i * 7) % 40]} h"] for i in range(60)]
    table = folder / "pairs.csv"
    table.write_text("query,title\n" + "".join(f"{a},{b}\n" for a, b in pairs))
    options = f"""
        --model hf:{save_tiny_bert(folder / "bert")} --loss maxsim --maxsim-dim 8 --device cpu
        --train-data {table} --val-data {table} --val-frequency 2 --output {folder / "run"}
        --global-batch-size 20 --micro-batch-size 10 --steps 4 --warmup 1 --precision fp32
        --plan off
    """
    assert main(["train", *options.split()]) == 0
    return folder / "run", table, pairs


def test_a_run_is_evaluated_by_maxsim(trained: tuple[Path, Path, list[list[str]]]) -> None:
    run, table, pairs = trained
    task = json.loads((run / "evaluation.json").read_text())["retrieval"]["pairs"]
    during = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
    assert [record["step"] for record in during] == [2, 4]
    recall = "image_to_text/recall@1"
    assert during[-1][f"pairs/{recall}"] == task["model"][recall]
    towers = open_run(run).towers
    towers.module.eval()
    first, second = ([*dict.fromkeys(texts)] for texts in zip(*pairs, strict=True))
    with torch.no_grad():
        tokens = torch.stack([towers.eval_transform(text) for text in first])
        x = towers.module.encode_image(tokens, normalize=True)
        y = towers.module.encode_text(towers.tokenizer(second), normalize=True)
    scores = dense(x, y)
    right = torch.tensor([[[a, b] in pairs for b in second] for a in first])
    expected = by_the_whole_matrix(scores, torch.eye(len(second)), right)
    assert task["model"] == pytest.approx(expected, abs=1e-9)
    again = evaluate_run(run, val_data=str(table), batch_size=7)
    assert again["retrieval"]["pairs"]["model"] == pytest.approx(expected, abs=1e-9)
    (content,) = json.loads((run / "report.json").read_text())["tasks"]
    for gallery, matrix, texts in zip(
        content["galleries"], (scores, scores.T), ((first, second), (second, first)), strict=True
    ):
        for query in gallery["examples"]:
            for answer in query["answers"]:
                place = texts[0].index(query["text"]), texts[1].index(answer["text"])
                assert answer["score"] == pytest.approx(matrix[place].item(), abs=1e-5)
    assert "with rank and MaxSim score" in Page((run / "report.html").read_text()).text


def test_tokens_are_kept_without_padding_in_the_encoders_precision(
    trained: tuple[Path, Path, Any],
) -> None:
    towers = open_run(trained[0]).towers
    texts = ["a", "a b c d e f g h", "b c"]
    exact, half = (
        Encoder(towers, precision=p, batch_size=2).texts(texts) for p in ("fp32", "bf16")
    )
    for tokens, dtype in ((exact, torch.float32), (half, torch.bfloat16)):
        assert isinstance(tokens, Tokens)
        assert tokens.features.dtype == dtype
        assert tokens.lengths.tolist() == [3, 10, 4]
        assert tokens.features.shape == (17, 8)
        torch.testing.assert_close(
            tokens.features.float().norm(dim=1), torch.ones(17), atol=0.01, rtol=0
        )


def test_images_are_not_classified_by_tokens(trained: tuple[Path, Path, Any]) -> None:
    opened = open_run(trained[0])
    of_images = Opened(replace(opened.towers, first="image"), None)
    with pytest.raises(
        UsageError, match=r"--class-data: .* has a feature for each token; expected"
    ):
        open_tasks(EvalConfig(run=trained[0], class_data="."), of_images)
