"""Small Hugging Face models, data for them, and Trainers with megabatch and without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from megabatch.losses import InfoNCELoss
from tests.models.tiny_clip import tiny_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from megabatch.integrations.transformers import MegabatchTrainerMixin  # noqa: E402

SAMPLES, BATCH, LENGTH = 20, 4, 6
TOWERS = {"both": ["q_proj", "v_proj"], "text": r".*text_model.*(q_proj|v_proj)"}

Rows = list[dict[str, Tensor]]


def model_of(kind: str) -> Any:
    """A model without dropout, with random numbers added to all of its weights."""
    torch.manual_seed(1)
    model = tiny_model(kind)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def bert() -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=12, intermediate_size=16, max_position_embeddings=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **sizes,
    )  # fmt: skip
    return transformers.BertModel(config)


def texts(count: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 12, (count, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH, (count, 1), generator=generator)
    mask = (torch.arange(LENGTH) <= lengths).long()
    ids = torch.where(torch.arange(LENGTH) == lengths, 3, ids * mask)  # 3 ends a text, 0 pads it
    return {"input_ids": ids, "attention_mask": mask}


def images_and_texts(count: int = SAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {**texts(count, 0), "pixel_values": torch.randn(count, 3, 32, 32, generator=generator)}


def rows_of(batch: Mapping[str, Tensor]) -> Rows:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def collate(rows: Rows) -> dict[str, Any]:
    batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {**batch, "return_loss": True}


def text_pairs(count: int = SAMPLES) -> Rows:
    """Rows of two texts and an id, which some rows share."""
    sides = [texts(count, seed) for seed in (3, 4)]
    named = {f"{n}{i}": value for i, side in enumerate(sides) for n, value in side.items()}
    return rows_of({**named, "ids": torch.arange(count) // 3})


def collate_pairs(rows: Rows) -> dict[str, Any]:
    def side(i: int) -> dict[str, Tensor]:
        names = ("input_ids", "attention_mask")
        return {name: torch.stack([row[f"{name}{i}"] for row in rows]) for name in names}

    return {"query": side(0), "passage": side(1), "ids": torch.stack([row["ids"] for row in rows])}


def arguments(folder: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "num_train_epochs": 1,
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "optim": "sgd",  # Adam would enlarge rounding errors of gradients that are zero
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    return transformers.TrainingArguments(**{**options, **changes})


class Plain(transformers.Trainer):  # type: ignore[name-defined, misc]
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Cached(MegabatchTrainerMixin, Plain):  # type: ignore[misc]
    """A user's own Trainer with the mixin."""


def images_trainer(
    kind: type, model: Any, options: Any, count: int, evaluated: int, **extra: Any
) -> Any:
    """A Trainer on so many images with their texts; it is evaluated on the first of them."""
    data = rows_of(images_and_texts(count))
    extra |= {"micro_batch_size": 3} if kind is Cached else {}
    return kind(
        model, options, data_collator=collate, train_dataset=data, eval_dataset=data[:evaluated],
        **extra,
    )  # fmt: skip


def with_adapters(model: Any, towers: str | None) -> Any:
    if towers is None:
        return model
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=TOWERS[towers], r=2))
    with torch.no_grad():  # half of LoRA's weights begin at zero
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def mean_features(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    states, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


class PlainPairs(Plain):
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        x, y = (mean_features(model, inputs[side]) for side in ("query", "passage"))
        loss = InfoNCELoss(temperature=0.1)(x, y, ids=inputs["ids"])
        return (loss, {"loss": loss, "x": x, "y": y}) if return_outputs else loss


def pairs_trainer(cached: bool, folder: Path, data: Rows, **extra: Any) -> Any:
    if cached:
        extra |= {
            "loss": InfoNCELoss(temperature=0.1, normalize=True),
            "loss_inputs": ("ids",),
            "pooling": "mean",
            "micro_batch_size": 3,
        }
    return (Cached if cached else PlainPairs)(
        bert(), arguments(folder, remove_unused_columns=False), data_collator=collate_pairs,
        train_dataset=data, eval_dataset=data[:10], **extra,
    )  # fmt: skip
