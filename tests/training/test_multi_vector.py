"""Pairs of texts with a feature for each token: steps and whole runs with `--loss maxsim`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch.config.objective import create_objective
from megabatch.config.settings import activation_bytes
from megabatch.data import Batch
from megabatch.models.padding import counted
from megabatch.training import TrainConfig, train
from megabatch.training.encoders import CachedStep
from tests.models.tiny_bert import made, save_tiny_bert
from tests.training.runs import losses, weights
from tests.training.test_run_parallel import assert_close, launch

__all__ = ["launch"]

NAMES = [" ".join(letters) for letters in itertools.combinations("abcdefgh", 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny text encoder without dropout, and pairs of texts of many lengths with negatives."""
    folder = tmp_path_factory.mktemp("multi-vector")
    bert = save_tiny_bert(folder / "bert") / "config.json"
    plain = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    bert.write_text(json.dumps({**json.loads(bert.read_text()), **plain}))
    rows = [
        {
            "query": name,
            "positive": " ".join([name[::-1]] * (1 + i % 4)),
            "negatives": [f"{NAMES[i - 1]} {name[0]}"],
        }
        for i, name in enumerate(NAMES)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(folder: Path, output: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=f"hf:{folder / 'bert'}",
        train_data=str(folder / "pairs.jsonl"),
        output=output,
        loss="maxsim",
        maxsim_dim=6,
        global_batch_size=11,
        micro_batch_size=4,
        steps=16,
        hard_negatives=1,
        lr=0.003,
        lr_scheduler="const",
        eps=1e-4,
        warmup=0,
        precision="fp32",
        device="cpu",
        plan="off",
        report_to=(),
    )
    return replace(config, **changes)


# --- a step ---------------------------------------------------------------------------------------


def dense_loss(module: Any, data: Batch, ids: Tensor | None) -> Tensor:
    """Cross-entropy of all queries' scores with all documents and negatives, undivided."""
    x = module.encode_image(data.images, normalize=True)
    texts = data.texts if data.texts.ndim == 3 else data.texts[..., None]
    y = module.encode_text(torch.cat(texts.unbind(2)), normalize=True)
    products = torch.einsum("ild,jkd->ijlk", x, y).masked_fill(~counted(y)[:, None], -torch.inf)
    scores = (products.amax(3) * counted(x)[:, None]).sum(2) / counted(x).sum(1)[:, None]
    logits = module.logit_scale.exp() * scores
    if ids is not None:
        twins = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
        logits = logits.masked_fill(twins, -torch.inf)
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(x)))


@pytest.mark.parametrize(("negatives", "share"), [(0, True), (0, False), (2, True)])
def test_loss_and_gradients_are_those_of_the_dense_scores(
    folder: Path, negatives: int, share: bool
) -> None:
    towers = made(folder / "bert", multi_vector=True, maxsim_dim=6, hf_share=share)
    module = towers.module.double()
    texts = [NAMES, [name * (1 + i % 4) for i, name in enumerate(NAMES)], NAMES[::-1], NAMES[3:]]
    tokens = [towers.tokenizer(some[:11]) for some in texts]
    ids = None if negatives else torch.arange(11) // 2
    second = torch.stack(tokens[1 : 2 + negatives], 2) if negatives else tokens[1]
    data = Batch(tokens[0], second, torch.arange(11))
    expected = dense_loss(module, data, ids)
    expected.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())

    module.zero_grad()
    duplicates: Any = "negatives" if negatives else "ignored"
    config = TrainConfig(loss="maxsim", hard_negatives=negatives, duplicates=duplicates)
    step = CachedStep(
        module,
        create_objective(config, group="local"),
        2,
        device=torch.device("cpu"),
        group="local",
        lengths=towers.lengths,
    )
    loss = step(data, ids)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=0, atol=1e-11)
    found = {name: p.grad for name, p in module.named_parameters()}
    torch.testing.assert_close(found, gradients, rtol=0, atol=1e-11)


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(folder: Path) -> TrainConfig:
    """A run of 16 steps, with a hard negative for each pair."""
    config = config_of(folder, folder / "whole")
    assert train(config) == 0
    return config


def test_a_run_learns_and_resumes_exactly(whole: TrainConfig, tmp_path: Path) -> None:
    found = losses(whole.output)
    assert sum(found[-4:]) < 0.9 * sum(found[:4])
    parts = replace(whole, output=tmp_path / "parts", steps=7)
    assert train(parts) == train(replace(parts, steps=16, resume=True)) == 0
    assert weights(parts.output) == weights(whole.output)


def test_two_processes_give_the_weights_of_one(
    whole: TrainConfig, tmp_path: Path, launch: Callable[..., Any]
) -> None:
    runs = [replace(whole, output=tmp_path / how, parallel=how) for how in ("ddp", "fsdp")]
    for run, told in zip(runs, launch(*(("", run) for run in runs)), strict=True):
        assert [rank["code"] for rank in told] == [0, 0], told[0]["err"]
        assert_close(run.output, whole.output)
        assert losses(run.output) == pytest.approx(losses(whole.output), abs=1e-5)


def test_memory_that_depends_on_the_longest_text_is_not_planned(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(folder, tmp_path / "run", steps=1, plan="warn", micro_batch_size="auto")
    assert activation_bytes(config, "cuda") == 0
    assert activation_bytes(replace(config, loss="infonce"), "cuda") is None
    assert train(config) == 0
    assert (
        "--loss maxsim cannot be planned: the memory of tokens' features" in capsys.readouterr().out
    )
