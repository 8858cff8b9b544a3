"""Hugging Face's Trainer and Accelerate train as without megabatch, on one process and on two."""

from __future__ import annotations

import runpy
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megabatch.gradient_cache import GradientCache
from megabatch.losses import ClipLoss, InfoNCELoss

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from megabatch.integrations.transformers import (  # noqa: E402
    OWN_LOSSES,
    FeatureEncoder,
    MegabatchTrainer,
    _refuse,
    own_loss,
)
from tests.docs.pages import ROOT  # noqa: E402
from tests.integrations.hf import (  # noqa: E402
    BATCH,
    Cached,
    Plain,
    arguments,
    bert,
    collate,
    collate_pairs,
    images_and_texts,
    images_trainer,
    model_of,
    pairs_trainer,
    rows_of,
    text_pairs,
    texts,
    with_adapters,
)
from tests.integrations.training import assert_weights_equal, descend, weights_of  # noqa: E402
from tests.process_state import changed  # noqa: E402
from tests.similarity.distributed.processes import World  # noqa: E402

EXAMPLE = str(ROOT / "examples" / "digit_halves" / "hf_trainer.py")
#: Trainers make their output folder, in which nothing is written here.
NOWHERE = Path(tempfile.gettempdir()) / "megabatch-tests"


def losses_logged(trainer: Any) -> list[float]:
    history = trainer.state.log_history
    return [entry[name] for entry in history for name in ("loss", "eval_loss") if name in entry]


@pytest.fixture
def _float64() -> Iterator[None]:
    """Set float64 as default: transformers 4.48 makes a mask in the default dtype."""
    with changed("default dtype", torch.float64):
        yield


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


@pytest.mark.parametrize(
    ("kind", "towers"),
    [("clip", None), ("siglip", None), ("clip", "both")],
    ids=["clip", "siglip", "LoRA"],
)
def test_trains_and_evaluates_as_the_trainer(kind: str, towers: str | None, tmp_path: Path) -> None:
    trainers = []
    for trainer_class in (Plain, Cached):
        model = with_adapters(model_of(kind), towers)
        before = weights_of(model)
        # The last batch has two rows, and its update one batch.
        trainer = images_trainer(trainer_class, model, arguments(tmp_path), 18, 10)
        trainer.train()
        trainer.evaluate()
        trainers.append(trainer)
    plain, cached = trainers
    assert_weights_equal(cached.model, plain.model, before)
    assert len(losses_logged(plain)) >= 3  # transformers 4.48 leaves out an incomplete update
    assert losses_logged(cached) == pytest.approx(losses_logged(plain), rel=1e-4)


@pytest.mark.parametrize("tokens", [None, 12])
def test_pairs_of_texts_through_one_encoder(tmp_path: Path, tokens: int | None) -> None:
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {}

    plain, cached = (
        pairs_trainer(c, tmp_path, text_pairs(), compute_metrics=metrics) for c in (False, True)
    )
    if tokens is not None:
        cached.micro_batch_size, cached.micro_batch_tokens = None, tokens
    plain.can_return_loss = True
    before = weights_of(cached.model)
    for trainer in (plain, cached):
        trainer.train()
        trainer.evaluate()
    assert_weights_equal(cached.model, plain.model, before)
    assert losses_logged(cached) == pytest.approx(losses_logged(plain), rel=1e-4)
    assert len(seen) == 2  # features of all pairs, for metrics
    for expected, features in zip(*seen, strict=True):
        assert features.shape == (10, 8)
        features = F.normalize(torch.tensor(features), dim=-1)
        torch.testing.assert_close(features, torch.tensor(expected), rtol=1e-4, atol=1e-5)


class Labelled(transformers.BertModel):  # type: ignore[name-defined, misc]
    """Its signature makes the Trainer expect labels, without which it asks for no loss."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


def test_evaluates_models_that_take_labels_without_any(tmp_path: Path) -> None:
    other = pairs_trainer(True, tmp_path, text_pairs())
    model = Labelled(other.model.config)
    model.load_state_dict(other.model.state_dict())
    labelled = made(
        tmp_path, model, data_collator=collate_pairs, eval_dataset=text_pairs()[:10],
        pooling="mean", loss=other.contrastive_loss, loss_inputs=("ids",),
        changes={"remove_unused_columns": False},
    )  # fmt: skip
    assert labelled.label_names == ["labels"]
    assert labelled.evaluate()["eval_loss"] == pytest.approx(other.evaluate()["eval_loss"])
    assert labelled.label_names == ["labels"]


def test_attributes_may_change_between_steps(tmp_path: Path) -> None:
    batch, sizes = collate_pairs(text_pairs(8)), []
    changed, other = (pairs_trainer(True, tmp_path, text_pairs(8)) for _ in range(2))
    before = changed.compute_loss(changed.model, batch)
    loss = InfoNCELoss(temperature=1.0, normalize=True)
    for trainer in (changed, other):
        trainer.micro_batch_size, trainer.pooling, trainer.contrastive_loss = 4, "cls", loss
    changed.model.encoder.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    found, expected = (t.compute_loss(t.model, batch) for t in (changed, other))
    torch.testing.assert_close(found, expected)
    assert not torch.isclose(found, before)
    assert set(sizes) == {4}


def test_a_users_hook_sees_the_models_output() -> None:
    model, batch = bert().eval(), texts(5, 0)
    states = model(**batch).last_hidden_state

    def doubled(_: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = 2 * output.last_hidden_state
        return output

    model.register_forward_hook(doubled)
    (found,) = FeatureEncoder(model, "cls")(batch)
    torch.testing.assert_close(found, 2 * states[:, 0])


class Watched(ClipLoss):
    autocast = False

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        self.autocast = torch.is_autocast_enabled(arguments[0].device.type)
        return super().forward(*arguments, **keywords)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.gpu)])
def test_half_precision_is_autocast_in_the_loss_too(precision: str, tmp_path: Path) -> None:
    """The model's own forward pass uses it too, and rounds in another order; float16 is scaled."""
    gradients, loss = [], Watched()
    on_gpu = precision == "fp16"
    for trainer_class, extra in ((Plain, {}), (Cached, {"loss": loss})):
        options = arguments(
            tmp_path, use_cpu=not on_gpu, max_steps=1, max_grad_norm=1e9, **{precision: True}
        )
        assert options.device.type == ("cuda" if on_gpu else "cpu")  # counts the machine's GPUs
        options._n_gpu = int(on_gpu)
        trainer = images_trainer(trainer_class, model_of("clip"), options, 20, 0, **extra)
        if on_gpu:
            scaler = trainer.accelerator.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})  # nothing overflows
        before = {name: value.cpu() for name, value in weights_of(trainer.model).items()}
        trainer.train()
        assert not on_gpu or scaler.get_scale() == 64
        after = weights_of(trainer.model)
        gradients.append(torch.cat([(before[n] - after[n].cpu()).flatten() / 0.3 for n in before]))
    assert loss.autocast
    plain, cached = gradients
    assert plain.norm() > 0
    assert (plain - cached).norm() < 0.02 * plain.norm()


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


def test_refuses_tokens_for_a_model_of_images_and_texts(tmp_path: Path) -> None:
    trainer = made(tmp_path, micro_batch_size=None, micro_batch_tokens=99)
    with pytest.raises(ValueError, match=r"shape \(4, 6\).*'pixel_values'.*\(4, 3, 32, 32\); use"):
        trainer.compute_loss(trainer.model, images_and_texts(4))


def test_refuses_settings_that_would_train_something_else(tmp_path: Path) -> None:
    """Settings that this machine does not offer are set directly."""
    trainer = made(tmp_path)
    assert not trainer.is_deepspeed_enabled
    if (config := getattr(accelerate, "ParallelismConfig", None)) is not None:  # since 1.10
        assert hasattr(trainer.accelerator, "parallelism_config")
        assert {"tp_size", "cp_size"} <= vars(config()).keys()
    space = types.SimpleNamespace
    fsdp1 = space(state=space(fsdp_plugin=space(fsdp_version=1)))
    tensor_parallel = space(state=space(), parallelism_config=space(tp_size=2))
    for place, name, value, message in (
        (trainer, "is_deepspeed_enabled", True, "deepspeed: it reduces"),
        (trainer, "accelerator", fsdp1, "fsdp: version 1 reduces"),
        (trainer, "accelerator", tensor_parallel, "parallelism_config: .* got tp"),
        (trainer.args, "_n_gpu", 2, "2 GPUs in one process"),
    ):
        patched = mock.patch.object(place, name, value)
        with patched, pytest.raises(ValueError, match=message):
            _refuse(trainer)


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


# --- two processes, see test_two_processes.py -----------------------------------------------------


def slices(batch: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    return {name: value[2 * BATCH * i :][: 2 * BATCH] for name, value in batch.items()}


def train_and_compare(model: Any, expected: Any, options: Any) -> Any:
    """Weights and losses become those of one process with the batches of both: `expected`."""
    batch, before = images_and_texts(8 * BATCH), weights_of(model)
    trainer = images_trainer(Cached, model, options, 8 * BATCH, 2 * BATCH)
    trainer.train()
    descend(expected, lambda i: expected(**slices(batch, i), return_loss=True).loss, 0.3, 0.5)
    with torch.no_grad():
        loss = expected(**slices(batch, 0), return_loss=True).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-4)
    if hasattr(model, "reshard"):
        model.reshard()
    assert_weights_equal(model, expected, before)
    return trainer


def on_two_the_models_own_loss_under_ddp(_: World) -> None:
    for kind, towers in (("clip", None), ("clip", "text"), ("siglip", None)):
        model, expected = (with_adapters(model_of(kind), towers) for _ in range(2))
        trainer = train_and_compare(model, expected, arguments(NOWHERE))
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    trainer.compute_metrics = runpy.run_path(EXAMPLE)["recall"]  # gets the features of both
    assert trainer.evaluate()["eval_x_to_y/queries"] == 2 * BATCH


def on_two_a_loop_with_accelerate(_: World) -> None:
    """A custom loop that accumulates two batches per step."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, expected, batch = model_of("siglip"), model_of("siglip"), images_and_texts(8 * BATCH)
    before, data = weights_of(model), DataLoader(rows_of(batch), BATCH, collate_fn=collate)
    sgd = torch.optim.SGD(model.parameters(), 0.3)
    model, optimizer, data = accelerator.prepare(model, sgd, data)
    step = GradientCache(FeatureEncoder(model), own_loss(model), 3)
    for own in data:
        with accelerator.accumulate(model):
            accelerator.backward(step(own))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    descend(expected, lambda i: expected(**slices(batch, i), return_loss=True).loss, 0.3, 0.5)
    assert_weights_equal(accelerator.unwrap_model(model), expected, before)


def set_cpu(state: Any) -> None:
    state.device = torch.device("cpu")


def on_two_the_trainers_fsdp2(_: World) -> None:
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
        model = model_of("siglip")
        trainer = train_and_compare(model, model_of("siglip"), options)
    assert trainer.accelerator.state.fsdp_plugin.fsdp_version == 2  # which 1 is refused by
    assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
