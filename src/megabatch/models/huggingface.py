"""Folders that transformers' `save_pretrained` wrote, and pairs of their text encoders."""

from __future__ import annotations

import copy
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.errors import UsageError, plural
from megabatch.imports import named_extras
from megabatch.models.names import has_weights
from megabatch.models.padding import MASKED_KINDS, Pooling, pool, without_padding
from megabatch.models.towers import OF_IMAGES, ModelOptions, Towers, TwoTowers
from megabatch.similarity.arguments import accumulator_dtype

#: Default for tokens per text: a larger one costs time for every short text.
CONTEXT_LENGTH = 128

#: Nothing is downloaded, and no code of the folder is run; by default transformers would ask.
READING: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}

#: The names of poolings in sentence-transformers' files, of older releases and of newer ones.
_SAVED: dict[str, Pooling] = {
    **{"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"},
    **{"pooling_mode_lasttoken": "last", "mean": "mean", "cls": "cls", "lasttoken": "last"},
}
_WITHOUT_EFFECT = {"Transformer", "Pooling", "Normalize"}  # on pooled features

#: Features of a token, unless --maxsim-dim says otherwise: ColBERT's.
TOKEN_DIM = 128


def read_config(folder: Path) -> Any:
    """Read a folder's configuration; raises MissingLibrary if transformers is not installed."""
    with named_extras():
        import tokenizers  # noqa: F401  (without it transformers' message is misleading)
        import transformers
    return transformers.AutoConfig.from_pretrained(folder, **READING)


def read_model(folder: Path, config: Any) -> Any:
    """Load a folder's model in float32; with random weights if the folder has none.

    Raises:
        UsageError: weights other than a pooler's are missing.
    """
    import transformers

    if not has_weights(folder):
        return transformers.AutoModel.from_config(config, trust_remote_code=False).float()
    # Else transformers makes one with random weights, and reports that they were missing.
    model, found = transformers.AutoModel.from_pretrained(
        folder, output_loading_info=True, **READING
    )
    missing = sorted(name for name in found["missing_keys"] if "pooler." not in name)
    if missing:  # transformers would use random ones
        raise UsageError(
            f"--model: {folder} lacks {plural(len(missing), 'tensor')} of its model, such as "
            f"{missing[0]}"
        )
    return model.float()


@dataclass(frozen=True)
class FolderTokenizer:
    """A Hugging Face tokenizer that each process loads for itself, so it is cheap to pickle.

    folder: of its files; pad: its padding token; context_length: tokens per text.
    """

    folder: Path
    pad: int
    context_length: int

    def __call__(self, texts: str | list[str]) -> Tensor:
        """Tokenise texts to int64 (n, context_length), truncated or padded to that length."""
        batch = [texts] if isinstance(texts, str) else list(texts)
        if not batch:
            return torch.zeros(0, self.context_length, dtype=torch.int64)
        encoded = _load_tokenizer(self.folder)(
            batch, padding="max_length", truncation=True, max_length=self.context_length
        )
        return torch.tensor(encoded["input_ids"], dtype=torch.int64)

    def of_one(self, text: str) -> Tensor:
        """Tokens of a text, int64 (context_length,): the transform of first texts."""
        return self([text])[0]


@functools.lru_cache(maxsize=4)
def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **READING)


def read_tokenizer(
    folder: Path, config: Any, context_length: int | None, *, masked: bool = True
) -> FolderTokenizer:
    """Load a folder's tokenizer, for a text encoder with this configuration.

    masked: whether padding is masked, by token.

    Raises:
        UsageError: there is none, it does not match the encoder, or the context is too long.
    """
    label = f"--model: the tokenizer of {folder}"
    # Without any of these transformers invents a tokenizer of a few special tokens.
    file_patterns = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
    if not any(path for pattern in file_patterns for path in folder.glob(pattern)):
        raise UsageError(f"{label} is missing: none of {', '.join(file_patterns)}")
    tokenizer = _load_tokenizer(folder)
    if tokenizer.pad_token_id is None:
        raise UsageError(f"{label} has no padding token")
    if masked and tokenizer.pad_token_id in tokenizer("a")["input_ids"]:  # as of some decoders
        raise UsageError(
            f"{label} puts its padding token, {tokenizer.pad_token}, into each text, where it "
            "would be masked too; expected another pad_token in its tokenizer_config.json"
        )
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    if context_length is not None and context_length > longest:
        raise UsageError(
            f"--force-context-length {context_length}: {folder} has positions for {longest}"
        )
    length = context_length or int(min(CONTEXT_LENGTH, longest, tokenizer.model_max_length))
    return FolderTokenizer(folder, int(tokenizer.pad_token_id), length)


def create(name: str, folder: Path, config: Any, options: ModelOptions) -> Towers:
    """Build a text encoder, or two, for pairs of texts; see `registry.create`."""
    options.refuse(name, *OF_IMAGES)
    if not hasattr(config, "hidden_size"):
        raise UsageError(f"--model: {folder} is not a text encoder: its config has no hidden_size")
    encoder = read_model(folder, config)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # BERT's, for another task: no feature uses it
    tokenizer = read_tokenizer(folder, config, options.force_context_length)
    if options.multi_vector:
        options.refuse(f"{name} with --loss maxsim", "hf_pooling")
        head = new_head(folder, config, options.maxsim_dim)
        first: nn.Module = TokenEncoder(encoder, tokenizer.pad, head)
    else:
        first = TextEncoder(encoder, tokenizer.pad, options.hf_pooling or saved_pooling(folder))
    second = None if options.hf_share else copy.deepcopy(first)
    module = TwoTowers(first, second, options, scale=20)  # common for sentence encoders
    lengths = functools.partial(without_padding, pad=tokenizer.pad)
    return Towers(
        name,
        module,
        tokenizer.of_one,
        tokenizer.of_one,
        tokenizer,
        head.out_features if options.multi_vector else int(config.hidden_size),
        first="text",
        lengths={"image": lengths, "text": lengths} if config.model_type in MASKED_KINDS else {},
        multi_vector=options.multi_vector,
    )


class TextEncoder(nn.Module):
    """A transformer whose last hidden states are pooled to one feature per text.

    pad: the padding token, which is masked in attention and in pooling.
    """

    def __init__(self, encoder: Any, pad: int, pooling: Pooling) -> None:
        super().__init__()
        self.encoder = encoder
        self.pad = pad
        self.pooling = pooling

    def forward(self, text: Tensor) -> Tensor:
        """Features (n, hidden size), not normalised, of tokens, int64 (n, context_length)."""
        return pool(*_states(self, text), self.pooling)


class TokenEncoder(nn.Module):
    """A transformer whose last hidden states are projected to a feature of each token (ColBERT).

    All of the tokenizer's tokens count, special ones too: there are no query expansion and no
    skiplist.
    """

    def __init__(self, encoder: Any, pad: int, projection: nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.pad = pad
        self.projection = projection

    def forward(self, text: Tensor) -> Tensor:
        """Features (n, context_length, d) of tokens, int64 (n, context_length), zeros for padding.

        They are not normalised.
        """
        states, mask = _states(self, text)
        features: Tensor = self.projection(states)
        # In float16 F.normalize would turn zeros into NaN.
        features = features.to(accumulator_dtype(features.dtype))
        return features.masked_fill(~mask[..., None], 0)


def _states(module: TextEncoder | TokenEncoder, text: Tensor) -> tuple[Tensor, Tensor]:
    """The last hidden states (n, context_length, hidden size), and the mask, false for padding."""
    mask = text != module.pad
    return module.encoder(input_ids=text, attention_mask=mask.long()).last_hidden_state, mask


def new_head(folder: Path, config: Any, dim: int | None) -> nn.Linear:
    """A random projection of tokens' states, as sentence-transformers makes it.

    Raises:
        UsageError: the folder has a projection of its own, which a run would not use.
    """
    path = folder / "config_sentence_transformers.json"
    saved = _read_json(path).get("model_type") if path.is_file() else None
    if saved in ("ColBERT", "MultiVectorEncoder") or "HF_ColBERT" in (config.architectures or ()):
        raise UsageError(
            f"--model: expected a folder without a projection of tokens, got {folder}, which was "
            "saved with one; sentence-transformers trains it with MegabatchMultiVectorRankingLoss "
            "(docs/integrations/sentence_transformers.md)"
        )
    return nn.Linear(config.hidden_size, dim or TOKEN_DIM, bias=False)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def saved_pooling(folder: Path) -> Pooling:
    """The pooling in a folder that sentence-transformers saved; "mean" in another one.

    Raises:
        UsageError: it is none of ours, or further modules change pooled features.
    """
    if not (folder / "modules.json").is_file():
        return "mean"
    modules = _read_json(folder / "modules.json")
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    places = (folder / modules[i]["path"] for i, kind in enumerate(kinds) if kind == "Pooling")
    config: dict[str, Any] = next((_read_json(place / "config.json") for place in places), {})
    modes = [key for key, on in config.items() if key.startswith("pooling_mode_") and on]
    modes += filter(None, [config.get("pooling_mode")])
    if len(modes) != 1 or modes[0] not in _SAVED or {*kinds} - _WITHOUT_EFFECT:
        raise UsageError(
            f"--model: sentence-transformers' files in {folder} name {', '.join(kinds)} with "
            f"{', '.join(modes) or 'no pooling'}, expected one pooling of mean, cls, last and "
            "nothing after it (--hf-pooling overrides them)"
        )
    return _SAVED[modes[0]]
