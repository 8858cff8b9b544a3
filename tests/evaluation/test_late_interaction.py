"""Evaluation by MaxSim: recall without the matrix, and runs of models with features of tokens."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
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
from tests.models.tiny_bert import save_tiny_bert


def dense(x: Tensor, y: Tensor) -> Tensor:
    """The scores of padded tokens, (m, n), in float64."""
    largest = torch.einsum("ild,jkd->ijlk", x.double(), y.double())
    largest = largest.masked_fill(~counted(y)[:, None], -torch.inf).amax(3)
    sums = largest.masked_fill(~counted(x)[:, None], 0).sum(2)
    means = sums / counted(x).sum(1).clamp(min=1)[:, None]
    return means.masked_fill(~counted(y).any(1), -1e9)  # unlike -inf, it can be multiplied by 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_figures_equal_the_dense_expression(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of right answers; texts of 0 to 9 tokens, padded block by block."""
    lengths = torch.randint(0, 6, (90,)), torch.randint(0, 10, (70,))
    x, y = (Tokens(F.normalize(torch.randn(int(n.sum()), 8), dim=1).to(dtype), n) for n in lengths)
    right = torch.rand(90, 70) < 0.02
    answers = answers_by_pairs(*right.nonzero().unbind(1), 90, 70)
    whole = dense(x.padded(slice(90))[0], y.padded(slice(70))[0])
    expected = by_the_whole_matrix(whole, torch.eye(70), right)
    for size in (256, 16):
        monkeypatch.setattr(retrieval, "_CPU_TEXTS", size)
        ways = "image_to_text", "text_to_image"
        assert figures_and_chance(x, y, answers, ks=(1, 5, 10), ways=ways)[0] == pytest.approx(
            expected
        )


def test_a_collapsed_model_scores_chance() -> None:
    token = F.normalize(torch.randn(1, 64), dim=1)
    x, y = (Tokens(token.repeat(n * k, 1), torch.full((n,), k)) for n, k in ((301, 3), (283, 7)))
    answers = answers_by_ids(torch.arange(301) % 283, torch.arange(283))
    found, chance = figures_and_chance(x, y, answers, ks=(1, 5))
    assert found == pytest.approx(chance, abs=1e-12)


def test_a_run_is_evaluated_by_maxsim(tmp_path: Path) -> None:
    """While it trains and afterwards."""
    draw, run, table = random.Random(0), tmp_path / "run", tmp_path / "pairs.csv"
    words = [" ".join(draw.choices("abcdefg", k=1 + i % 8)) for i in range(40)]
    pairs = [[words[i % 33], f"{words[(i * 7) % 40]} h"] for i in range(60)]
    table.write_text("query,title\n" + "".join(f"{a},{b}\n" for a, b in pairs))
    options = f"""
        --model hf:{save_tiny_bert(tmp_path / "bert")} --loss maxsim --maxsim-dim 8 --device cpu
        --train-data {table} --val-data {table} --val-frequency 2 --output {run} --plan off
        --global-batch-size 20 --micro-batch-size 10 --steps 4 --warmup 1 --precision fp32
    """
    assert main(["train", *options.split()]) == 0
    towers = open_run(run).towers
    towers.module.eval()
    first, second = ([*dict.fromkeys(texts)] for texts in zip(*pairs, strict=True))
    with torch.no_grad():
        x = towers.module.encode_image(torch.stack([*map(towers.eval_transform, first)]), True)
        scores = dense(x, towers.module.encode_text(towers.tokenizer(second), True))
    right = torch.tensor([[[a, b] in pairs for b in second] for a in first])
    expected = pytest.approx(by_the_whole_matrix(scores, torch.eye(len(second)), right))
    evaluation = json.loads((run / "evaluation.json").read_text())
    for found in (evaluation, evaluate_run(run, val_data=str(table), batch_size=7)):
        assert found["retrieval"]["pairs"]["model"] == expected
    content = json.loads((run / "report.json").read_text())["tasks"][0]
    example = content["galleries"][1]["examples"][0]
    for answer in example["answers"]:
        pair = first.index(answer["text"]), second.index(example["text"])
        assert answer["score"] == pytest.approx(scores[pair].item(), abs=1e-5)
    assert (
        "with rank and score (cosine, or of tokens)" in Page((run / "report.html").read_text()).text
    )

    half = Encoder(towers, precision="bf16", batch_size=2).texts(["a", "a b c d e", "b c"])
    assert isinstance(half, Tokens)
    assert half.lengths.tolist() == [3, 7, 4]
    assert (half.features.dtype, half.features.shape) == (torch.bfloat16, (14, 8))
    of_images = Opened(replace(towers, first="image"), None)
    with pytest.raises(
        UsageError, match=r"--class-data: .* has a feature for each token; expected"
    ):
        open_tasks(EvalConfig(run=run, class_data="."), of_images)
