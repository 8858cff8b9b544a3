"""The interface of a model to the rest of the library, a module of two towers, and locks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.errors import UsageError, as_usage_error
from megabatch.losses.registry import TRAINABLE
from megabatch.models.padding import Lengths, Pooling
from megabatch.options import option

Tower = Literal["image", "text"]
#: Options of image towers that only models of OpenCLIP have.
OF_IMAGES = ("force_patch_dropout", "force_image_size", "image_seq_len")


@dataclass(frozen=True)
class ModelOptions:
    """Changes to a model's own configuration; None leaves it unchanged.

    Args:
        force_patch_dropout: fraction of the image's patches dropped in training, at least 0 and
            below 1 (Li et al. 2022, FLIP, arXiv 2212.00794).
        force_image_size: pixels per side; positional embeddings of loaded weights are resized.
        image_seq_len: patches per image at most, for towers of timm's NaFlexVit: images keep their
            aspect ratio.
        force_context_length: tokens per text, as `force_image_size`.
        init_logit_scale: initial logarithm of the logit scale.
        init_logit_bias: initial logit bias; a model without one gets one. Both only apply if loaded
            weights have no value.
        hf_pooling: for pairs of texts, the feature of a text: the mean over its tokens, the first
            token or the last one. Default: as the folder says if sentence-transformers saved it,
            else the mean.
        hf_share: for pairs of texts, one encoder for both; otherwise two, with equal initial
            weights.
        multi_vector: for pairs of texts, a feature for each token instead of one per text.
        maxsim_dim: the width of these features. Default: 128, ColBERT's.
    """

    force_patch_dropout: float | None = None
    force_image_size: int | None = None
    image_seq_len: int | None = None
    force_context_length: int | None = None
    init_logit_scale: float | None = None
    init_logit_bias: float | None = None
    hf_pooling: Pooling | None = None
    hf_share: bool = True
    multi_vector: bool = False
    maxsim_dim: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ModelOptions:
        """Extract the options from a run's settings, such as its config.toml.

        With `loss` among the settings, scale and bias start where that loss wants them unless they
        are set: those of "siglip" at 10 and -10, as in the paper (Zhai et al. 2023, arXiv
        2303.15343) and OpenCLIP. With "maxsim" the model gets a feature for each token.
        """
        names = [field.name for field in fields(cls)]
        chosen = {name: settings[name] for name in names if settings.get(name) is not None}
        if loss := TRAINABLE.get(settings.get("loss", "")):
            starts = {"init_logit_scale": loss.initial_scale, "init_logit_bias": loss.initial_bias}
            chosen = {k: value for k, value in starts.items() if value is not None} | chosen
            chosen["multi_vector"] = loss.multi_vector
        return cls(**chosen)

    def refuse(self, model: str, *names: str) -> None:
        """Raise a UsageError if any of these options, which the model does not have, is given."""
        default = ModelOptions()
        given = [option(name) for name in names if getattr(self, name) != getattr(default, name)]
        if given:
            raise UsageError(f"{', '.join(given)}: {model} has no such option")


@dataclass
class Towers:
    """A two-tower model with the transforms and tokenizer of its inputs.

    Args:
        name: the model's name for `megabatch.models.create`.
        module: `module(image, text)` returns a dict with `image_features` and `text_features`, both
            (n, embed_dim) and L2-normalised; `logit_scale`, exponentiated, shape () or (1,); and,
            if the model has one, `logit_bias`. An input that is None gives features that are None.
            If the model is `multi_vector`, features are (n, tokens, embed_dim), of each token, and
            zeros for padding.
            It has `encode_image(images, normalize=False)`, `encode_text(texts, normalize=False)`
            and the parameter `logit_scale` (a logarithm), like open_clip's models.
        train_transform, eval_transform: one image (or first text) to one tensor for `encode_image`;
            picklable. The first may be random, with torch's global generator. They may return
            anything if they have a method `collate`, which makes of a list of results a mapping of
            tensors (n, ...), such as patches and a mask; then `encode_image` takes such mappings. A
            method `from_bytes` gets files as they are, such as sounds, instead of images.
        tokenizer: texts to int64 (n, context_length).
        embed_dim: width of the features.
        first: kind of a pair's first element; a model of text pairs also takes it as `image`.
        lengths: for each tower that takes texts or patches without their padding, the function
            that tells on how many of them features depend (`megabatch.models.padding`); other
            towers take whole texts only.
        multi_vector: whether there is a feature for each token, for late interaction.
    """

    name: str
    module: nn.Module
    train_transform: Callable[[Any], Any]
    eval_transform: Callable[[Any], Any]
    tokenizer: Callable[[Any], torch.Tensor]
    embed_dim: int
    first: Tower = "image"
    lengths: Mapping[Tower, Lengths] = field(default_factory=dict)
    multi_vector: bool = False


class TwoTowers(nn.Module):
    """Two towers with the interface of `Towers.module`.

    Args:
        visual: images, or first texts, to features (n, d), or (n, length, d), not normalised.
        text: tokens to features likewise. None: `visual` encodes both texts.
        options: initial scale and bias; default: no bias.
        scale: the default of the initial scale, before its logarithm; open_clip's.
    """

    def __init__(
        self,
        visual: nn.Module,
        text: nn.Module | None,
        options: ModelOptions | None = None,
        *,
        scale: float = 1 / 0.07,
    ) -> None:
        super().__init__()
        options = options or ModelOptions()
        start, bias = options.init_logit_scale, options.init_logit_bias
        start = math.log(scale) if start is None else start
        self.visual, self.text = visual, text
        self.logit_scale = nn.Parameter(torch.tensor(float(start)))
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(float(bias)))

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Features (n, d) of transformed images; see `Towers` for those of tokens."""
        features = self.visual(image)
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Features (n, d) of tokens, int64 (n, context_length), likewise."""
        features = (self.visual if self.text is None else self.text)(text)
        return F.normalize(features, dim=-1) if normalize else features

    def forward(
        self, image: Tensor | None = None, text: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        """Normalised features of both, and the scale; see `Towers`."""
        found = {
            "image_features": None if image is None else self.encode_image(image, normalize=True),
            "text_features": None if text is None else self.encode_text(text, normalize=True),
            "logit_scale": self.logit_scale.exp(),
        }
        bias = self.logit_bias
        return found if bias is None else {**found, "logit_bias": bias}


def tower_of(name: str) -> Tower:
    """The tower that a parameter or submodule belongs to, by its name in the model."""
    return "image" if f"{name}.".startswith("visual.") else "text"


def tower_parameters(module: nn.Module) -> dict[Tower, dict[str, nn.Parameter]]:
    """The parameters of each tower by name; scale and bias are in neither.

    If one encoder serves both sides, both have all of its parameters.
    """
    found: dict[Tower, dict[str, nn.Parameter]] = {"image": {}, "text": {}}
    for name, parameter in module.named_parameters():
        if name not in ("logit_scale", "logit_bias"):
            found[tower_of(name)][name] = parameter
    return {**found, "text": found["text"] or found["image"]}


def lock(module: nn.Module, tower: Tower, *, unlocked: int = 0) -> None:
    """Freeze a tower (Zhai et al. 2022, "LiT", arXiv 2111.07991), as open_clip does for its models.

    Args:
        module: of `Towers`.
        tower: "image" (the first) or "text".
        unlocked: the last groups of layers that stay trainable, for open_clip's models, which count
            them: in transformers a group is a layer, and the projection is the last one.

    Raises:
        UsageError: the model cannot lock this tower in this way.
    """
    option, towers = f"--lock-{tower}", tower_parameters(module)
    if not towers["image"]:
        raise UsageError(f"{option}: expected a model whose first tower is its submodule `visual`")
    if towers["image"].keys() == towers["text"].keys():
        raise UsageError(f"{option}: one encoder serves both sides; expected two (--no-hf-share)")
    parameters = towers[tower].values()
    own = getattr(module, f"lock_{tower}_tower", None)
    if own is not None:
        with as_usage_error(option):
            own(unlocked)
    elif unlocked:
        raise UsageError(f"{option}: this model's towers are locked as a whole, got {unlocked}")
    else:
        for parameter in parameters:
            parameter.requires_grad_(False)
    if all(parameter.requires_grad for parameter in parameters):
        raise UsageError(
            f"{option}: with {unlocked} groups unlocked nothing of the {tower} tower stays locked"
        )


def locked_towers(module: nn.Module) -> frozenset[Tower]:
    """The towers without trainable parameters, which run once per step."""
    towers = tower_parameters(module)
    return frozenset(
        tower
        for tower, parameters in towers.items()
        if not any(parameter.requires_grad for parameter in parameters.values())
    )


def set_modes(module: nn.Module) -> nn.Module:
    """Put a module in training mode, and its completely locked towers in evaluation mode.

    A locked tower's features then depend on the sample alone: there is no dropout or patch dropout,
    and batch normalisation does not use the micro-batch's statistics.
    """
    module.train()
    locked = locked_towers(module)
    for name, child in module.named_children():
        if tower_of(name) in locked:
            child.eval()
    return module
