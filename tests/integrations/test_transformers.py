"""Hugging Face's Trainer and Accelerate train as without megabatch, on one process and on two."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, SequentialSampler

from megabatch.gradient_cache import GradientCache
from megabatch.losses import ClipLoss, InfoNCELoss
from tests.integrations.two_processes import failures
from tests.models.tiny_clip import tiny_model

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from megabatch.integrations.transformers import (  # noqa: E402
    OWN_LOSSES,
    FeatureEncoder,
    MegabatchTrainer,
    MegabatchTrainerMixin,
    own_loss,
)

SAMPLES, BATCH, LENGTH = 20, 4, 6
TOWERS = {
    "both": ["q_proj", "v_proj"],
    "text": r".*text_model.*(q_proj|v_proj)",
}

Rows = list[dict[str, Tensor]]


@pytest.fixture(autouse=True)
def _new_accelerator() -> Iterator[None]:
    """Accelerate keeps a process's first precision; older releases, in environment variables."""
    with mock.patch.dict(os.environ):
        yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def model_of(kind: str) -> Any:
    """A model without dropout, whose random weights are far from symmetric."""
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
    """Rows of two texts and an id that some share."""
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


class InOrder:
    """A Trainer that does not shuffle."""

    train_dataset: Rows

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Plain(InOrder, transformers.Trainer):  # type: ignore[name-defined, misc]
    pass


class Cached(MegabatchTrainerMixin, Plain):  # type: ignore[misc]
    """As a user adds the mixin to a Trainer of their own."""


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    whole = {
        name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()
    }
    return {name: weight.detach().clone() for name, weight in whole.items()}


def assert_weights_equal(found: nn.Module, expected: nn.Module, before: dict[str, Tensor]) -> None:
    other, moved = weights_of(expected), 0.0
    for name, value in weights_of(found).items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5, msg=name)
        moved = max(moved, (value - before[name]).abs().max().item())
    assert moved > 1e-2


def losses_logged(trainer: Any) -> list[float]:
    history = trainer.state.log_history
    return [entry[name] for entry in history for name in ("loss", "eval_loss") if name in entry]


@pytest.fixture
def _float64() -> Iterator[None]:
    """As default: transformers 4.48 makes a mask in that dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("kind", sorted(OWN_LOSSES))
def test_loss_and_gradients_are_those_of_the_models_forward(kind: str) -> None:
    model = model_of(kind).double().eval()  # no dropout
    batch = images_and_texts(7)
    batch["pixel_values"] = batch["pixel_values"].double()
    expected = model(**batch, return_loss=True).loss
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = GradientCache(FeatureEncoder(model), own_loss(model), 3)(batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-11, msg=name)


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


@pytest.mark.parametrize(
    ("kind", "towers"),
    [("clip", None), ("siglip", None), ("clip", "text"), ("clip", "both")],
    ids=["clip", "siglip", "LoRA on one tower", "LoRA on both"],
)
def test_trains_and_evaluates_as_the_trainer(kind: str, towers: str | None, tmp_path: Path) -> None:
    data = rows_of(images_and_texts(18))  # the last batch is of two, its accumulation of one
    trainers = []
    for trainer_class, extra in ((Plain, {}), (Cached, {"micro_batch_size": 3})):
        model = with_adapters(model_of(kind), towers)
        before = weights_of(model)
        trainer = trainer_class(
            model, arguments(tmp_path), data_collator=collate, train_dataset=data,
            eval_dataset=data[:10], **extra,
        )  # fmt: skip
        trainer.train()
        trainer.evaluate()
        trainers.append(trainer)
    plain, cached = trainers
    assert_weights_equal(cached.model, plain.model, before)
    assert len(losses_logged(plain)) >= 3  # transformers 4.48 leaves out an incomplete update
    assert losses_logged(cached) == pytest.approx(losses_logged(plain), rel=1e-4)


def mean_features(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    states, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def dense_loss(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """InfoNCE at a temperature of 0.1; other passages of the same id are left out."""
    others = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
    logits = (10 * x @ y.T).masked_fill(others, -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(x)))


class PlainPairs(Plain):
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        x, y = (mean_features(model, inputs[side]) for side in ("query", "passage"))
        loss = dense_loss(x, y, inputs["ids"])
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


def test_pairs_of_texts_through_one_encoder(tmp_path: Path) -> None:
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {}

    plain, cached = (
        pairs_trainer(c, tmp_path, text_pairs(), compute_metrics=metrics) for c in (False, True)
    )
    plain.can_return_loss = True
    before = weights_of(cached.model)
    for trainer in (plain, cached):
        trainer.train()
        trainer.evaluate()
    assert_weights_equal(cached.model, plain.model, before)
    assert losses_logged(cached) == pytest.approx(losses_logged(plain), rel=1e-4)
    assert len(seen) == 2  # features of all pairs, for metrics
    for unit, features in zip(*seen, strict=True):
        assert features.shape == (10, 8)
        features = F.normalize(torch.tensor(features), dim=-1)
        torch.testing.assert_close(features, torch.tensor(unit), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_pooling_takes_the_first_token_or_the_last(pooling: Any) -> None:
    model, batch = bert().eval(), texts(5, 0)
    states = model(**batch).last_hidden_state
    last = batch["attention_mask"].sum(1) - 1
    expected = states[:, 0] if pooling == "cls" else states[torch.arange(5), last]
    (found,) = FeatureEncoder(model, pooling)(batch)
    torch.testing.assert_close(found, expected)


def test_the_model_makes_logits_of_a_micro_batch_alone() -> None:
    model, made = model_of("clip"), []
    forward = model.forward

    def watched(**batch: Any) -> Any:
        output = forward(**batch)
        made.append(tuple(output.logits_per_image.shape))
        return output

    model.forward = watched
    GradientCache(FeatureEncoder(model), own_loss(model), 3)(images_and_texts(7)).backward()
    assert set(made) == {(3, 3), (1, 1)}


class Watched(ClipLoss):
    autocast = False

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        self.autocast = torch.is_autocast_enabled("cpu")
        return super().forward(*arguments, **keywords)


def test_bfloat16_is_autocast_in_the_loss_too(tmp_path: Path) -> None:
    """As in the model's own forward pass, which rounds in another order."""
    data, gradients, loss = rows_of(images_and_texts()), [], Watched()
    for trainer_class, extra in ((Plain, {}), (Cached, {"micro_batch_size": 3, "loss": loss})):
        trainer = trainer_class(
            model_of("clip"), arguments(tmp_path, bf16=True, max_steps=1, max_grad_norm=1e9),
            data_collator=collate, train_dataset=data, **extra,
        )  # fmt: skip
        before = weights_of(trainer.model)
        trainer.train()
        after = weights_of(trainer.model)
        gradients.append(torch.cat([(before[n] - after[n]).flatten() / 0.3 for n in before]))
    assert loss.autocast
    plain, cached = gradients
    assert (plain - cached).norm() < 0.02 * plain.norm()


def accelerated(cached: bool, batches: int = 4) -> tuple[nn.Module, dict[str, Tensor]]:
    """A loop of one's own, two batches accumulated for a step; the model that it trained."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = model_of("siglip")
    before = weights_of(model)
    data = DataLoader(rows_of(images_and_texts(BATCH * batches)), BATCH, collate_fn=collate)
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.3), data
    )
    step = GradientCache(FeatureEncoder(model), own_loss(model), 3)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(step(batch) if cached else model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model), before


def test_a_loop_with_accelerate() -> None:
    (plain, before), (cached, _) = accelerated(False), accelerated(True)
    assert_weights_equal(cached, plain, before)


def made(folder: Path, model: nn.Module | None = None, **extra: Any) -> Any:
    changes = extra.pop("changes", {})
    return MegabatchTrainer(
        model_of("clip") if model is None else model, arguments(folder, **changes),
        **{"micro_batch_size": 3, **extra},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("named", "extra"),
    [
        ("compute_loss_func", {"compute_loss_func": lambda *_, **__: None}),
        ("label_smoothing_factor", {"changes": {"label_smoothing_factor": 0.1}}),
        ("loss: expected one for BertModel, got None", {"model": "bert", "pooling": "mean"}),
        ("loss: its parameter temperature", {"loss": InfoNCELoss(nn.Parameter(torch.ones(1)))}),
        ("micro_batch_size: expected at least 1, got 0", {"micro_batch_size": 0}),
        ('pooling: expected "mean", "cls", "last" or None, got \'max\'', {"pooling": "max"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_arguments(named: str, extra: dict[str, Any], tmp_path: Path) -> None:
    if extra.get("model") == "bert":
        extra = {**extra, "model": bert()}
    with pytest.raises(ValueError, match=named):
        made(tmp_path, **extra)


@pytest.mark.parametrize("kind", ["deepspeed", "fsdp", "n_gpu", "parallelism"])
def test_refuses_what_would_train_something_else(kind: str, tmp_path: Path) -> None:
    """The settings as they are on machines that offer them."""

    class Pretends(Plain):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            state = types.SimpleNamespace(fsdp_plugin=None)
            self.accelerator = types.SimpleNamespace(state=state, parallelism_config=None)
            if kind == "deepspeed":
                self.is_deepspeed_enabled = True
            elif kind == "fsdp":
                state.fsdp_plugin = types.SimpleNamespace(fsdp_version=1)
            elif kind == "n_gpu":
                self.args._n_gpu = 2
            else:
                sizes = types.SimpleNamespace(tp_size=2, cp_size=1, sp_size=1)
                self.accelerator.parallelism_config = sizes

    class Trainer(MegabatchTrainerMixin, Pretends):
        pass

    with pytest.raises(ValueError, match="GPUs in one process" if kind == "n_gpu" else kind):
        Trainer(model_of("clip"), arguments(tmp_path), micro_batch_size=3)


def refuse_batch(trainer: Any, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer.compute_loss(trainer.model, batch)


def test_refuses_batches(tmp_path: Path) -> None:
    both = collate_pairs(text_pairs(4))
    ids = both.pop("ids")
    pairs = made(tmp_path, bert(), pooling="mean", loss=InfoNCELoss(temperature=0.1))
    refuse_batch(pairs, {**both, "ids": ids}, "inputs: expected tensors .* ids: Tensor")
    refuse_batch(pairs, both["query"], "inputs: expected a mapping for each text")
    pairs.loss_inputs = ("ids",)
    refuse_batch(pairs, both, "loss_inputs: ids is not in the batch, which has query, passage")
    no_pooling = made(tmp_path, bert(), loss=InfoNCELoss(temperature=0.1))
    refuse_batch(no_pooling, both, "got last_hidden_state, pooler_output and pooling=None")


def reference(model: nn.Module, loss_of: Callable[[int], Tensor], updates: int) -> None:
    """Plain SGD on the batches of both ranks, of two accumulated batches each."""
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


def on_two_a_clip_model_under_ddp() -> None:
    """As one process with the batches of both; so are the losses that are logged."""
    batch = images_and_texts(8 * BATCH)
    for towers in (None, "text"):
        model, expected = (with_adapters(model_of("clip"), towers) for _ in range(2))
        before = weights_of(model)
        data = rows_of(batch)
        trainer = Cached(
            model, arguments(Path("unused")), data_collator=collate, train_dataset=data,
            eval_dataset=data[: 2 * BATCH], micro_batch_size=3,
        )  # fmt: skip
        trainer.train()
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
        reference(expected, lambda i, m=expected: m(**slices(batch, i), return_loss=True).loss, 2)
        assert_weights_equal(model, expected, before)
        with torch.no_grad():
            loss = expected(**slices(batch, 0), return_loss=True).loss
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-4)


def on_two_a_local_loss_is_as_the_models_own_under_ddp() -> None:
    """A batch of each rank's rows alone, as `return_loss=True` has it."""
    data, trained = rows_of(images_and_texts(8 * BATCH)), []
    local = {"micro_batch_size": 3, "loss": ClipLoss(group="local")}
    for trainer_class, extra in ((Plain, {}), (Cached, local)):
        model = model_of("clip")
        before = weights_of(model)
        trainer_class(
            model, arguments(Path("unused")), data_collator=collate, train_dataset=data, **extra
        ).train()
        trained.append(model)
    assert_weights_equal(trained[1], trained[0], before)


def on_two_pairs_of_texts_under_ddp() -> None:
    rows = text_pairs(8 * BATCH)
    expected = bert()
    before = weights_of(expected)
    trainer = pairs_trainer(True, Path("unused"), rows)
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


def on_two_a_sharded_siglip_model() -> None:
    model, expected = model_of("siglip"), model_of("siglip")
    for layer in (*model.text_model.encoder.layers, *model.vision_model.encoder.layers, model):
        fully_shard(layer)
    batch = images_and_texts(2 * BATCH)
    mine = {name: value.chunk(2)[dist.get_rank()] for name, value in batch.items()}
    GradientCache(FeatureEncoder(model), own_loss(model), 3)(mine).backward()
    expected(**batch, return_loss=True).loss.backward()
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), gradients[name], rtol=1e-4, atol=1e-5, msg=name
        )


def set_cpu(state: Any) -> None:
    state.device = torch.device("cpu")


def on_two_the_trainers_fsdp2() -> None:
    """Accelerate offers FSDP2 on GPUs alone: it is told that these CPUs are some."""
    if not hasattr(accelerate.utils.FullyShardedDataParallelPlugin, "fsdp_version"):
        return  # before Accelerate 1.6
    backend = "gloo", accelerate.utils.DistributedType.MULTI_GPU
    state = accelerate.PartialState
    with (
        mock.patch.object(state, "_prepare_backend", return_value=backend),
        mock.patch.object(state, "set_device", set_cpu),
    ):
        layers = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["SiglipEncoderLayer"]}
        options = arguments(Path("unused"), fsdp=True, fsdp_config=layers)
        batch, model, expected = images_and_texts(8 * BATCH), model_of("siglip"), model_of("siglip")
        before, data = weights_of(model), rows_of(batch)
        trainer = Cached(
            model, options, data_collator=collate, train_dataset=data,
            eval_dataset=data[: 2 * BATCH], micro_batch_size=3,
        )  # fmt: skip
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
        on_two_a_clip_model_under_ddp,
        on_two_a_local_loss_is_as_the_models_own_under_ddp,
        on_two_pairs_of_texts_under_ddp,
        on_two_a_loop_with_accelerate,
        on_two_a_sharded_siglip_model,
        on_two_the_trainers_fsdp2,
    ]
    found = failures(checks, ("transformers.trainer", "accelerate", "peft"), tmp_path)
    assert not found, "\n".join(found)
