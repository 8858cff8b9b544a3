"""Models of pairs of texts: Hugging Face encoders from a folder, with their own tokenizer."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.models import weights as files
from megabatch.models.hf_folder import FolderTokenizer, check_padding, read_model, read_tokenizer
from megabatch.models.layers import Tower, lock_layers
from megabatch.models.padding import Lengths, is_masked_kind, without_padding
from megabatch.models.pooling import Pooling, pool
from megabatch.models.towers import ModelOptions, Towers, TwoTowers


def create(
    name: str, folder: Path, config: Any, weights: Path | None, options: ModelOptions
) -> Towers:
    """Build a pair of text encoders; see `registry.create`, which reads the config."""
    if given := options.given("force_patch_dropout", "force_image_size"):
        raise UsageError(f"{', '.join(given)}: {name} has no images")
    if not hasattr(config, "hidden_size"):
        raise UsageError(f"--model: {folder} is not a text encoder: its config has no hidden_size")
    encoder = read_model(folder, config, pooler=False)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # BERT's, for another task: no feature uses it
    tokenizer = read_tokenizer(folder, config, options.force_context_length)
    check_padding(tokenizer)
    module = TextPair(encoder, tokenizer.pad, options)
    if weights is not None:
        files.fill(module, files.load(weights), weights, name)
    first = FirstText(tokenizer)
    width = int(config.hidden_size)
    lengths: dict[Tower, Lengths] = {}
    if is_masked_kind(config):
        masked = functools.partial(without_padding, pad=tokenizer.pad)
        lengths = {"image": masked, "text": masked}
    return Towers(
        name, module.train(), first, first, tokenizer, width, first="text", lengths=lengths
    )


class TextEncoder(nn.Module):
    """A transformer whose last hidden states are pooled to one feature per text.

    pad: the padding token, which is masked in attention and in pooling.
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
        return pool(states, mask, self.pooling)


class TextPair(TwoTowers):
    """Two texts, encoded by one encoder or two; the first takes the place of the image.

    If both sides share one module, there is no child `second`.
    """

    def __init__(self, encoder: nn.Module, pad: int, options: ModelOptions) -> None:
        nn.Module.__init__(self)
        self.first = TextEncoder(encoder, pad=pad, pooling=options.hf_pooling)
        if not options.hf_share:
            second = copy.deepcopy(encoder)
            self.second = TextEncoder(second, pad=pad, pooling=options.hf_pooling)
        self.share = options.hf_share
        self.start_scale(options, math.log(1 / 0.05))  # common for sentence encoders

    @property
    def visual(self) -> TextEncoder:  # type: ignore[override]
        """The encoder of first texts."""
        return self.first

    @property
    def text(self) -> TextEncoder:  # type: ignore[override]
        """The encoder of second texts."""
        return self.first if self.share else self.second

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        """Freeze the first texts' encoder except for its last layers; open_clip's interface."""
        self._lock("first", unlocked_groups)

    def lock_text_tower(self, unlocked_layers: int = 0) -> None:
        """Freeze the second texts' encoder except for its last layers."""
        self._lock("second", unlocked_layers)

    def _lock(self, side: str, unlocked: int) -> None:
        if self.share:
            raise ValueError("one encoder serves both sides; expected two (--no-hf-share)")
        lock_layers(self, f"{side}.", unlocked)


@dataclass(frozen=True)
class FirstText:
    """The transform of first texts, instead of an image's: a text to its tokens."""

    tokenizer: FolderTokenizer

    def __call__(self, text: str) -> Tensor:
        """Tokens, int64 (context_length,)."""
        return self.tokenizer(text)[0]

    def texts(self, texts: list[str]) -> Tensor:
        """Tokens of many texts, int64 (n, context_length)."""
        return self.tokenizer(texts)
