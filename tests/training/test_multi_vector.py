"""Pairs of texts with a feature for each token: a step, and runs with `--loss maxsim`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.config.objective import create_objective
from megabatch.config.settings import activation_bytes
from megabatch.data import Batch
from megabatch.models.padding import counted
from megabatch.training import TrainConfig, train
from megabatch.training.encoders import CachedStep
from tests.models.tiny_bert import made
from tests.training.runs import losses
from tests.training.test_negatives import config_of, folder
from tests.training.test_run_parallel import assert_close, launch

__all__ = ["folder", "launch"]


def dense_loss(module: Any, data: Batch) -> Tensor:
    """Cross-entropy of the queries' scores with all documents and negatives, undivided."""
    x = module.encode_image(data.images, normalize=True)
    texts = data.texts if data.texts.ndim == 3 else data.texts[..., None]
    y = module.encode_text(torch.cat(texts.unbind(2)), normalize=True)
    products = torch.einsum("ild,jkd->ijlk", x, y).masked_fill(~counted(y)[:, None], -torch.inf)
    scores = (products.amax(3) * counted(x)[:, None]).sum(2) / counted(x).sum(1)[:, None]
    return F.cross_entropy(module.logit_scale.exp() * scores, torch.arange(len(x)))


@pytest.mark.parametrize(("negatives", "share"), [(0, False), (2, True)])
def test_loss_and_gradients_are_those_of_the_dense_scores(
    folder: Path, negatives: int, share: bool
) -> None:
    towers = made(folder / "bert", multi_vector=True, maxsim_dim=6, hf_share=share)
    module = towers.module.double()
    words = [[" ".join("abcdefgh"[i * j % 8 : i + j]) for i in range(11)] for j in range(1, 5)]
    first, *texts = map(towers.tokenizer, words)
    data = Batch(first, torch.stack(texts, 2) if negatives else texts[0], torch.arange(11))
    dense = dense_loss(module, data)
    dense.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())

    module.zero_grad()
    config = TrainConfig(loss="maxsim", hard_negatives=negatives)
    objective = create_objective(config, group="local")
    options: Any = {"device": torch.device("cpu"), "group": "local", "lengths": towers.lengths}
    loss = CachedStep(module, objective, 2, **options)(data)
    loss.backward()
    torch.testing.assert_close(loss.detach(), dense.detach(), rtol=0, atol=1e-11)
    found = {name: p.grad for name, p in module.named_parameters()}
    torch.testing.assert_close(found, gradients, rtol=0, atol=1e-11)


def test_a_run_learns_without_a_plan_and_two_processes_give_its_weights(
    folder: Path, tmp_path: Path, launch: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    alone = config_of(folder, tmp_path / "alone", loss="maxsim", hard_negatives=1, eps=1e-4)
    alone = replace(alone, plan="warn", steps=12, lr=3e-3, warmup=0, duplicates="ignored")
    assert [activation_bytes(replace(alone, loss=n), "cuda") for n in ("maxsim", "clip")] == [
        0,
        None,
    ]
    assert train(alone) == 0
    assert "--loss maxsim cannot be planned: the memory of tokens'" in capsys.readouterr().out
    assert sum(losses(alone.output)[-3:]) < 0.9 * sum(losses(alone.output)[:3])
    runs = [replace(alone, output=tmp_path / how, parallel=how) for how in ("ddp", "fsdp")]
    for run, told in zip(runs, launch(*(("", run) for run in runs)), strict=True):
        assert [rank["code"] for rank in told] == [0, 0], told[0]["err"]
        assert_close(run.output, alone.output)
        assert losses(run.output) == pytest.approx(losses(alone.output), abs=1e-5)
