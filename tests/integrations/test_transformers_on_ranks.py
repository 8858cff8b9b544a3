"""Hugging Face's Trainer and Accelerate on two processes equal one with the batches of both."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.docs.pages import ROOT
from tests.integrations.two_processes import failures

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from tests.integrations.hf import (  # noqa: E402
    BATCH,
    Cached,
    accelerated,
    arguments,
    assert_weights_equal,
    bert,
    collate,
    collate_pairs,
    dense_loss,
    images_and_texts,
    mean_features,
    model_of,
    pairs_trainer,
    rows_of,
    text_pairs,
    weights_of,
    with_adapters,
)

EXAMPLE = str(ROOT / "examples" / "digit_halves" / "hf_trainer.py")
#: Trainers make their output folder, in which nothing is written here.
NOWHERE = Path(tempfile.gettempdir()) / "megabatch-tests"


def reference(model: nn.Module, loss_of: Callable[[int], Tensor], updates: int) -> None:
    """Plain SGD on the joined batches of both ranks; a step accumulates two of them."""
    for update in range(updates):
        for i in (2 * update, 2 * update + 1):
            (loss_of(i) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.3 * parameter.grad
        model.zero_grad()


def slices(batch: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    return {name: value[2 * BATCH * i :][: 2 * BATCH] for name, value in batch.items()}


def on_two_the_models_own_loss_under_ddp() -> None:
    """Weights and logged losses are those of one process with the batches of both."""
    batch = images_and_texts(8 * BATCH)
    for kind, towers in (("clip", None), ("clip", "text"), ("siglip", None)):
        model, expected = (with_adapters(model_of(kind), towers) for _ in range(2))
        before = weights_of(model)
        data = rows_of(batch)
        trainer = Cached(
            model, arguments(NOWHERE), data_collator=collate, train_dataset=data,
            eval_dataset=data[: 2 * BATCH], micro_batch_size=3,
        )  # fmt: skip
        trainer.train()
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
        reference(expected, lambda i, m=expected: m(**slices(batch, i), return_loss=True).loss, 2)
        assert_weights_equal(model, expected, before)
        with torch.no_grad():
            loss = expected(**slices(batch, 0), return_loss=True).loss
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-4)
    trainer.compute_metrics = runpy.run_path(EXAMPLE)["recall"]  # gets the features of both
    assert trainer.evaluate()["eval_x_to_y/queries"] == 2 * BATCH


def on_two_pairs_of_texts_under_ddp() -> None:
    rows = text_pairs(8 * BATCH)
    expected = bert()
    before = weights_of(expected)
    trainer = pairs_trainer(True, NOWHERE, rows)
    trainer.train()

    def loss_of(i: int) -> Tensor:
        batch = collate_pairs(rows[2 * BATCH * i :][: 2 * BATCH])
        x, y = (mean_features(expected, batch[side]) for side in ("query", "passage"))
        return dense_loss(x, y, batch["ids"])

    reference(expected, loss_of, 2)
    assert_weights_equal(trainer.model, expected, before)


def on_two_a_loop_with_accelerate() -> None:
    model, before = accelerated(True, batches=8)
    batch, expected = images_and_texts(8 * BATCH), model_of("siglip")
    reference(expected, lambda i: expected(**slices(batch, i), return_loss=True).loss, 2)
    assert_weights_equal(model, expected, before)


def set_cpu(state: Any) -> None:
    state.device = torch.device("cpu")


def on_two_the_trainers_fsdp2() -> None:
    """Accelerate offers FSDP2 on GPUs only; a patch makes it accept the CPU."""
    if not hasattr(accelerate.utils.FullyShardedDataParallelPlugin, "fsdp_version"):
        return  # before Accelerate 1.6
    backend = "gloo", accelerate.utils.DistributedType.MULTI_GPU
    state = accelerate.PartialState
    with (
        mock.patch.object(state, "_prepare_backend", return_value=backend),
        mock.patch.object(state, "set_device", set_cpu),
    ):
        layers = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["SiglipEncoderLayer"]}
        options = arguments(NOWHERE, fsdp=True, fsdp_config=layers)
        batch, model, expected = images_and_texts(8 * BATCH), model_of("siglip"), model_of("siglip")
        before, data = weights_of(model), rows_of(batch)
        trainer = Cached(
            model, options, data_collator=collate, train_dataset=data,
            eval_dataset=data[: 2 * BATCH], micro_batch_size=3,
        )  # fmt: skip
        assert trainer.accelerator.state.fsdp_plugin.fsdp_version == 2  # which 1 is refused by
        trainer.train()
        assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        reference(expected, lambda i: expected(**slices(batch, i), return_loss=True).loss, 2)
        loss = expected(**slices(batch, 0), return_loss=True).loss
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-4)
    model.reshard()
    assert_weights_equal(model, expected, before)


@pytest.mark.concurrency
def test_on_two_processes(tmp_path: Path) -> None:
    checks = [
        on_two_the_models_own_loss_under_ddp,
        on_two_pairs_of_texts_under_ddp,
        on_two_a_loop_with_accelerate,
        on_two_the_trainers_fsdp2,
    ]
    found = failures(checks, ("transformers.trainer", "accelerate", "peft"), tmp_path)
    assert not found, "\n".join(found)
