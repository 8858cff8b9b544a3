"""Hugging Face's Trainer with gradient caching and losses that form no similarity matrix.

    from megabatch.integrations.transformers import MegabatchTrainer

    trainer = MegabatchTrainer(clip, arguments, micro_batch_size=64, train_dataset=..., ...)

`FeatureEncoder` and `own_loss` are its two parts, for a loop of your own, with Accelerate for
example. See docs/integrations/transformers.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from megabatch.gradient_cache import GradientCache
from megabatch.gradient_cache.wrappers import parameters_in
from megabatch.losses import ClipLoss, SigLipLoss
from megabatch.models.padding import Pooling, pool
from megabatch.torch_internals import uncompiled

#: The loss that models of these types compute with `return_loss=True`.
OWN_LOSSES: dict[str, type[nn.Module]] = {
    "altclip": ClipLoss,
    "chinese_clip": ClipLoss,
    "clip": ClipLoss,
    "metaclip_2": ClipLoss,
    "siglip": SigLipLoss,
    "vision-text-dual-encoder": ClipLoss,
}
_TWO_TOWERS = ("image_embeds", "text_embeds")


def own_loss(model: nn.Module) -> nn.Module:
    """The loss that a model computes with `return_loss=True`, over the batch of all ranks.

    Raises:
        ValueError: the model's loss is not one that megabatch knows.
    """
    core = _core(model)
    kind = getattr(getattr(core, "config", None), "model_type", None)
    if kind not in OWN_LOSSES:
        raise ValueError(
            f"loss: expected one for {type(core).__name__}, got None; None stands for the model's "
            f"own loss, for models of type {', '.join(OWN_LOSSES)}"
        )
    return OWN_LOSSES[kind]()


class FeatureEncoder(nn.Module):
    """A Hugging Face model as an encoder of `GradientCache`, called with one batch, a mapping.

    A model that returns `image_embeds` and `text_embeds` gives both, followed by exp(logit_scale)
    and logit_bias if it has them; any other model gives one feature per row, pooled from its
    `last_hidden_state`. The model may be wrapped, by DistributedDataParallel, `fully_shard`,
    torch.compile, PEFT or `Accelerator.prepare`: the features are taken from the output of the
    model inside, so wrappers do not see outputs that get no gradient, such as a micro-batch's
    logits.
    """

    def __init__(self, model: nn.Module, pooling: Pooling | None = None) -> None:
        """`pooling`: "mean", "cls" or "last", for models without `image_embeds`."""
        super().__init__()
        if pooling not in (None, "mean", "cls", "last"):
            raise ValueError(f'pooling: expected "mean", "cls", "last" or None, got {pooling!r}')
        self.model = model
        self.pooling = pooling

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Features of a batch, each (n, d); then scale and bias, in the model's own shapes."""
        batch = {name: value for name, value in batch.items() if name != "return_loss"}
        core = _core(self.model)
        # After the user's hooks, which see the model's output; before FSDP2's own, which may shard
        # the scale.
        first = hasattr(core, "set_requires_gradient_sync")
        hook = core.register_forward_hook(self._features, prepend=first, with_kwargs=True)
        try:
            features: tuple[Tensor, ...] = self.model(**batch)
        finally:
            hook.remove()
        return features

    def _features(
        self, core: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any], output: Any
    ) -> tuple[Tensor, ...]:
        if all(getattr(output, name, None) is not None for name in _TWO_TOWERS):
            return (output.image_embeds, output.text_embeds, *_scale_and_bias(core))
        states = getattr(output, "last_hidden_state", None)
        if states is None or self.pooling is None:
            got = ", ".join(output) if isinstance(output, Mapping) else type(output).__name__
            raise ValueError(
                f"model: expected {type(core).__name__} to return image_embeds and text_embeds, or "
                f'last_hidden_state with pooling="mean", "cls" or "last"; got {got} and '
                f"pooling={self.pooling!r}"
            )
        mask = inputs.get("attention_mask")
        mask = states.new_ones(states.shape[:2]) if mask is None else mask
        return (pool(states, mask, self.pooling),)


class MegabatchTrainerMixin:
    """Trains with gradient caching: `class MyTrainer(MegabatchTrainerMixin, MyOwnTrainer)`.

    A batch is what the model takes, or a mapping for each text, such as
    `{"query": {"input_ids": ...}, "passage": {...}}`, which the model encodes one after the other.
    The loss is that of the batch of all ranks. Evaluation computes the same loss; predictions, for
    `compute_metrics`, are the features of both sides, each (n, d). Between steps the attributes
    `micro_batch_size`, `micro_batch_tokens`, `pooling` and `contrastive_loss` may be set.
    """

    model: nn.Module
    accelerator: Any
    label_names: list[str]
    #: The loss is a mean; the Trainer divides it by the accumulated batches.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        *args: Any,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        loss: Callable[..., Tensor] | None = None,
        pooling: Pooling | None = None,
        loss_inputs: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        """Make a Trainer.

        Args:
            *args, **kwargs: the Trainer's own.
            micro_batch_size: rows that go through the model at once, at least 1.
            micro_batch_tokens: instead, for a model of texts that masks padding: the most tokens,
                padding included, that go through it at once, in order of length; see
                `GradientCache`.
            loss: called with what `FeatureEncoder` returns, `loss(image_embeds, text_embeds,
                logit_scale)` for CLIP, followed by logit_bias for SigLIP, or one feature for each
                text of a pair, `loss(query, passage)`; and with `loss_inputs` as keyword arguments.
                CLIP-like models normalise their features; pooled ones are not normalised. None: the
                model's own loss.
            pooling: how the last hidden states of a text encoder become features: "mean", "cls"
                (the first token) or "last".
            loss_inputs: names of a batch's entries that are passed to the loss instead of the
                model, such as "ids".

        Raises:
            ValueError: an argument of the Trainer or of its TrainingArguments would not have its
                usual meaning; the message says why.
        """
        super().__init__(*args, **kwargs)
        _refuse(self)
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.pooling = pooling
        self.loss_inputs = tuple(loss_inputs)
        self.contrastive_loss = own_loss(self.model) if loss is None else loss
        _check_no_parameters(self.contrastive_loss, self.model)
        self._step: tuple[Any, GradientCache] | None = None
        self._step_for(self.model, 1)  # checks the arguments
        # A mean over pairs has no number of items to be divided by.
        self.model_accepts_loss_kwargs = False
        self.can_return_loss = True

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of a batch; with `return_outputs` also a dict of it and the features."""
        batches, for_loss = self._split(inputs)
        step = self._step_for(model, len(batches))
        with self.accelerator.autocast():  # for the loss, which the model computes in its forward
            loss = step(*batches.values(), **for_loss)
        if not return_outputs:
            return loss
        names = _TWO_TOWERS if len(batches) == 1 else tuple(batches)
        return loss, {"loss": loss, **dict(zip(names, self._features, strict=False))}

    def prediction_step(
        self, model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The Trainer's, for which a batch may lack labels that the model's forward names."""
        names = self.label_names
        self.label_names = [name for name in names if inputs.get(name) is not None]
        try:
            return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.label_names = names

    def _split(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The batches of the encoders, one or one per text, and the loss's own inputs."""
        absent = [name for name in self.loss_inputs if name not in inputs]
        if absent:
            raise ValueError(
                f"loss_inputs: {', '.join(absent)} is not in the batch, which has "
                f"{', '.join(inputs)} (remove_unused_columns=False keeps what the model does not "
                "take)"
            )
        apart = *self.loss_inputs, "return_loss"
        rest = {name: value for name, value in inputs.items() if name not in apart}
        for_loss = {name: inputs[name] for name in self.loss_inputs}
        texts = [value for value in rest.values() if isinstance(value, Mapping)]
        if not texts:
            return {"inputs": rest}, for_loss
        if len(texts) < 2 or len(texts) < len(rest):
            got = ", ".join(f"{name}: {type(value).__name__}" for name, value in rest.items())
            raise ValueError(
                "inputs: expected tensors for one call of the model, or a mapping for each of "
                f"several calls, got {got}"
            )
        return rest, for_loss

    def _step_for(self, model: nn.Module, batches: int) -> GradientCache:
        """The step of so many batches, the same one until an attribute is changed."""
        sizes = self.micro_batch_size, self.micro_batch_tokens
        key = model, batches, *sizes, self.pooling, self.contrastive_loss
        if self._step is None or self._step[0] != key:
            encoder = FeatureEncoder(model, self.pooling)
            encoders = encoder if batches == 1 else (encoder,) * batches
            size, tokens = sizes
            step = GradientCache(encoders, self._score, size, micro_batch_tokens=tokens)
            self._step = key, step
        return self._step[1]

    def _score(self, *outputs: Tensor, **inputs: Any) -> Tensor:
        """The loss of encoders' outputs; stores the features among them, for predictions."""
        self._features = [output.detach() for output in outputs if output.ndim > 1]
        if len(self._features) < 2:
            raise ValueError(
                "inputs: expected a mapping for each text of a pair, such as "
                '{"query": {"input_ids": ...}, "passage": {...}}, got one batch for a model that '
                "returns one feature per row"
            )
        return self.contrastive_loss(*outputs, **inputs)


class MegabatchTrainer(MegabatchTrainerMixin, Trainer):
    """Hugging Face's Trainer with gradient caching; see `MegabatchTrainerMixin`."""


def _scale_and_bias(core: nn.Module) -> tuple[Tensor, ...]:
    """exp(logit_scale) and logit_bias, those that a model has."""
    scale, bias = (getattr(core, name, None) for name in ("logit_scale", "logit_bias"))
    # DDP with find_unused_parameters, the Trainer's default, takes a parameter that is itself an
    # output for unused: it has no graph.
    scalars = (None if scale is None else scale.exp(), None if bias is None else bias.clone())
    return tuple(scalar for scalar in scalars if scalar is not None)


def _core(model: Any) -> nn.Module:
    """The Hugging Face model inside wrappers of torch.compile, DDP and PEFT."""
    inner: Any = None
    while inner is not model:
        inner, model = model, uncompiled(model)
        if isinstance(model, DistributedDataParallel):
            model = model.module
    core: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return core


def _refuse(trainer: Any) -> None:
    """Raise an error for settings of a Trainer with which something else would be trained."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    sizes = getattr(trainer.accelerator, "parallelism_config", None)
    shared = [kind for kind in ("tp", "cp", "sp") if getattr(sizes, f"{kind}_size", 1) > 1]
    refused = [
        (
            trainer.is_deepspeed_enabled,
            "deepspeed: it reduces gradients by hooks of its own in every backward pass, which "
            "cannot be held back until the last micro-batch; use DistributedDataParallel (torchrun "
            'alone) or fsdp with fsdp_config={"fsdp_version": 2}',
        ),
        (
            plugin is not None and getattr(plugin, "fsdp_version", 1) != 2,
            "fsdp: version 1 reduces gradients in every micro-batch; expected "
            'fsdp_config={"fsdp_version": 2}',
        ),
        (
            bool(shared),
            f"parallelism_config: expected data parallelism alone, got {', '.join(shared)}: the "
            "ranks of such a group have the same rows, and the loss takes each rank's for rows of "
            "its own",
        ),
        (
            trainer.args.n_gpu > 1,
            f"args: {trainer.args.n_gpu} GPUs in one process would be DataParallel, whose replicas "
            "share no batch; start one process per GPU (torchrun, accelerate launch)",
        ),
        (
            trainer.compute_loss_func is not None,
            "compute_loss_func: expected None: it takes a model's output, with the logits of all "
            "pairs; pass loss=",
        ),
        (
            trainer.args.label_smoothing_factor != 0,
            f"label_smoothing_factor: expected 0, got {trainer.args.label_smoothing_factor}: it is "
            "for labels, of which there are none; pass loss=ClipLoss(label_smoothing=...)",
        ),
    ]
    for applies, reason in refused:
        if applies:
            raise ValueError(reason)


def _check_no_parameters(loss: Callable[..., Tensor], model: nn.Module) -> None:
    owner = getattr(loss, "__self__", loss)
    if not isinstance(owner, (nn.Module, functools.partial, FunctionType)):
        return  # an object may have other models too, such as a teacher
    trained = {id(parameter) for parameter in model.parameters()}
    for name, parameter in parameters_in(loss).items():
        if parameter.requires_grad and id(parameter) not in trained:
            raise ValueError(
                f"loss: its parameter {name} is not one of the model's, so the Trainer's "
                "optimizer would not train it; make it a parameter of the model too"
            )
