"""Pairs of texts: Hugging Face encoders out of a folder, with their own tokenizer."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.models import weights as files
from megabatch.models.layers import layer_ids
from megabatch.models.options import ModelOptions, Pooling
from megabatch.models.towers import Towers, outputs

#: What the name of such a model begins with; the rest is the folder.
PREFIX = "hf:"

#: Tokens a text where nothing else is said: longer ones cost time for every short one.
CONTEXT_LENGTH = 128


def create(name: str, weights: Path | None, options: ModelOptions) -> Towers:
    """Build a pair of text encoders from a folder that transformers' `save_pretrained` wrote.

    Args:
        name: "hf:PATH". Without a file of weights in the folder the encoder starts at random.
        weights: a file of the whole pair's weights, that `weights.find` gave; or None.
        options: pooling, one or two encoders, context length, start of scale and bias.

    Raises:
        UsageError: transformers is not installed, or cannot read the folder; the weights are
            another model's; an option that this model has not.
    """
    if given := options.given("force_patch_dropout", "force_image_size"):
        raise UsageError(f"{', '.join(given)}: {name} has no images")
    folder = Path(name.removeprefix(PREFIX))
    encoder = _encoder(folder)
    start = options.init_logit_scale
    scale = math.log(1 / 0.05) if start is None else start  # usual for sentence encoders
    tokenizer = _tokenizer(folder, encoder.config, options.force_context_length)
    module = TextPair(
        encoder,
        pad=tokenizer.pad,
        pooling=options.hf_pooling,
        share=options.hf_share,
        init_logit_scale=scale,
        init_logit_bias=options.init_logit_bias,
    )
    if weights is not None:
        try:
            module.load_state_dict(files.load(weights))
        except RuntimeError as error:
            raise UsageError(
                f"pretrained: {weights} does not hold the weights of {name}"
            ) from error
    first = FirstText(tokenizer)
    width = int(encoder.config.hidden_size)
    return Towers(name, module.train(), first, first, tokenizer, width, first="text")


class TextEncoder(nn.Module):
    """A transformer whose last hidden states are pooled to one feature a text.

    pad: the token that fills texts up: nothing attends to it, and it is in no feature.
    """

    def __init__(self, encoder: Any, *, pad: int, pooling: Pooling) -> None:
        super().__init__()
        self.encoder = encoder
        self.pad = pad
        self.pooling = pooling

    def forward(self, text: Tensor) -> Tensor:
        """Features (n, hidden size), not normalised, of tokens, int64 (n, context_length)."""
        mask = text != self.pad
        states: Tensor = self.encoder(input_ids=text, attention_mask=mask.long()).last_hidden_state
        if self.pooling == "cls":
            return states[:, 0]
        if self.pooling == "last":  # wherever the padding is
            places = torch.arange(text.shape[1], device=text.device)
            last = torch.where(mask, places, 0).amax(dim=1)
            return states[torch.arange(len(text), device=text.device), last]
        some = mask.unsqueeze(-1).to(states.dtype)
        return (states * some).sum(1) / some.sum(1).clamp(min=1)


class TextPair(nn.Module):
    """Two texts by one encoder or two; the first stands where other models have the image.

    With `share` both sides are one module, and `second` is no child of its own.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        pad: int,
        pooling: Pooling,
        share: bool,
        init_logit_scale: float,
        init_logit_bias: float | None,
    ) -> None:
        super().__init__()
        self.first = TextEncoder(encoder, pad=pad, pooling=pooling)
        if not share:
            self.second = TextEncoder(copy.deepcopy(encoder), pad=pad, pooling=pooling)
        self.share = share
        self.logit_scale = nn.Parameter(torch.tensor(init_logit_scale))
        bias = None if init_logit_bias is None else nn.Parameter(torch.tensor(init_logit_bias))
        self.logit_bias: nn.Parameter | None
        self.register_parameter("logit_bias", bias)

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Features (n, hidden size) of the first texts' tokens, int64 (n, context_length)."""
        features = self.first(image)
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Features (n, hidden size) of the second texts' tokens, int64 (n, context_length)."""
        features = self.first(text) if self.share else self.second(text)
        return F.normalize(features, dim=-1) if normalize else features

    def forward(
        self, image: Tensor | None = None, text: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        """Normalised features of both, and the scale; see `Towers`."""
        return outputs(self, image, text)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations in the backward pass, as open_clip's models have it."""
        for side in [self.first] if self.share else [self.first, self.second]:
            verb = "enable" if enable else "disable"
            # The second name goes in transformers 6, the first came in 5.
            names = [f"{kind}_checkpointing_{verb}" for kind in ("activation", "gradient")]
            getattr(side.encoder, next(n for n in names if hasattr(side.encoder, n)))()

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        """Lock the first texts' encoder but for its last layers; as open_clip's models have it."""
        self._lock("first", unlocked_groups)

    def lock_text_tower(self, unlocked_layers: int = 0) -> None:
        """Lock the second texts' encoder but for its last layers."""
        self._lock("second", unlocked_layers)

    def _lock(self, side: str, unlocked: int) -> None:
        if self.share:
            raise ValueError("one encoder serves both sides; expected two (hf_share = false)")
        for name, (layer, last) in layer_ids(self).items():
            if name.startswith(f"{side}.") and layer <= last - unlocked:
                self.get_parameter(name).requires_grad_(False)


@dataclass(frozen=True)
class FolderTokenizer:
    """A Hugging Face tokenizer that is read again in each process: cheap to send to workers.

    folder: where it is; pad: its token of padding; context_length: tokens a text.
    """

    folder: Path
    pad: int
    context_length: int

    def __call__(self, texts: str | list[str]) -> Tensor:
        """The texts' tokens, int64 (n, context_length), cut off or padded to that length."""
        batch = [texts] if isinstance(texts, str) else list(texts)
        if not batch:
            return torch.zeros(0, self.context_length, dtype=torch.int64)
        encoded = _read_tokenizer(self.folder)(
            batch, padding="max_length", truncation=True, max_length=self.context_length
        )
        return torch.tensor(encoded["input_ids"], dtype=torch.int64)


@dataclass(frozen=True)
class FirstText:
    """The first text of a pair in the place of an image's transform: one text to its tokens."""

    tokenizer: FolderTokenizer

    def __call__(self, text: str) -> Tensor:
        """Tokens, int64 (context_length,)."""
        return self.tokenizer(text)[0]

    def texts(self, texts: list[str]) -> Tensor:
        """Tokens of many texts, int64 (n, context_length)."""
        return self.tokenizer(texts)


@lru_cache(maxsize=4)
def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _encoder(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise UsageError(f"model: {folder} is no folder of a Hugging Face model: no config.json")
    try:
        import transformers
    except ImportError as error:
        raise UsageError("model: 'hf:' models need transformers: megabatch[hf]") from error
    transformers.utils.logging.disable_progress_bar()
    try:
        if any(folder.glob("*.safetensors*")) or any(folder.glob("pytorch_model*.bin*")):
            encoder: Any = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
        else:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            encoder = transformers.AutoModel.from_config(config)
    except Exception as error:  # whatever the architecture's own code raises
        raise UsageError(f"model: {folder} cannot be read: {_one_line(error)}") from error
    encoder = encoder.float()  # whatever it was stored in
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # BERT's, of another task: no feature here comes from it
    if not hasattr(encoder.config, "hidden_size"):
        raise UsageError(f"model: {folder} is no text encoder: its config has no hidden_size")
    return encoder


def _tokenizer(folder: Path, config: Any, context_length: int | None) -> FolderTokenizer:
    # Without any of them transformers makes one up, of a handful of special tokens.
    files_of_one = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
    if not any(path for pattern in files_of_one for path in folder.glob(pattern)):
        raise UsageError(f"model: {folder} has no tokenizer: none of {', '.join(files_of_one)}")
    try:
        tokenizer = _read_tokenizer(folder)
    except Exception as error:
        raise UsageError(f"model: the tokenizer of {folder}: {_one_line(error)}") from error
    if tokenizer.pad_token_id is None:
        raise UsageError(f"model: the tokenizer of {folder} has no token of padding")
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"model: the tokenizer of {folder} has {len(tokenizer)} tokens, but the encoder knows "
            f"only {config.vocab_size}"
        )
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    if context_length is not None and context_length > longest:
        raise UsageError(
            f"force_context_length: {context_length}, but {folder} has positions for {longest}"
        )
    length = context_length or int(min(CONTEXT_LENGTH, longest, tokenizer.model_max_length))
    return FolderTokenizer(folder, int(tokenizer.pad_token_id), length)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."
