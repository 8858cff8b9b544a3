"""Reading a folder that transformers' `save_pretrained` wrote: configuration, model, tokenizer."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch.errors import UsageError, one_line, plural
from megabatch.imports import named_extras
from megabatch.models import weights
from megabatch.models.names import has_weights

#: Default for tokens per text: a larger one costs time for every short text.
CONTEXT_LENGTH = 128

#: Nothing is downloaded, and no code of the folder is run; by default transformers would ask.
_READING: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}

#: Part of the names of the weights of BERT's pooler.
_POOLER = "pooler."


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
        encoded = _read_tokenizer(self.folder)(
            batch, padding="max_length", truncation=True, max_length=self.context_length
        )
        return torch.tensor(encoded["input_ids"], dtype=torch.int64)


@lru_cache(maxsize=4)
def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **_READING)


def read_config(folder: Path) -> Any:
    """Read a folder's configuration with transformers.

    Raises:
        UsageError: transformers is not installed, or cannot read it.
    """
    with named_extras():
        import tokenizers  # noqa: F401  (without it transformers' message is misleading)
        import transformers
    try:
        return transformers.AutoConfig.from_pretrained(folder, **_READING)
    except Exception as error:  # whatever the architecture's own code raises
        raise UsageError(f"--model: {folder} cannot be read: {one_line(error, 240)}") from error


def read_model(folder: Path, config: Any, *, pooler: bool = True) -> Any:
    """Load a folder's model in float32; with random weights if the folder has none.

    pooler: whether BERT's pooler is used; if not, its weights may be missing.

    Raises:
        UsageError: transformers cannot read it, or some of its weights are missing.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    missing: list[str] = []
    try:
        if has_weights(folder):
            # Else transformers makes one with random weights, and reports that they were missing.
            left_out = not pooler and has_optional_pooler(config) and not _has_pooler(folder)
            options = {**_READING, **({"add_pooling_layer": False} if left_out else {})}
            model, found = transformers.AutoModel.from_pretrained(
                folder, output_loading_info=True, **options
            )
            missing = sorted(n for n in found["missing_keys"] if pooler or _POOLER not in n)
        else:
            model = transformers.AutoModel.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever the architecture's own code raises
        raise UsageError(f"--model: {folder} cannot be read: {one_line(error, 240)}") from error
    if missing:  # transformers would use random ones
        raise UsageError(
            f"--model: {folder} lacks {plural(len(missing), 'tensor')} of its model, such as "
            f"{missing[0]}"
        )
    in_float32: Any = model.float()
    return in_float32


def has_optional_pooler(config: Any) -> bool:
    """Whether transformers makes this configuration's model without BERT's pooler on request."""
    import transformers

    kind = transformers.MODEL_MAPPING.get(type(config), None)
    return isinstance(kind, type) and "add_pooling_layer" in inspect.signature(kind).parameters


def _has_pooler(folder: Path) -> bool:
    """Whether a folder's weights have a pooler, as far as safetensors tell without being loaded."""
    files = [*folder.glob("*.safetensors")]
    return not files or any(_POOLER in name for file in files for name in weights.names(file))


def read_tokenizer(folder: Path, config: Any, context_length: int | None) -> FolderTokenizer:
    """Load a folder's tokenizer, for a text encoder with this configuration.

    Raises:
        UsageError: there is none, it does not match the encoder, or the context is too long.
    """
    # Without any of these transformers invents a tokenizer of a few special tokens.
    file_patterns = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
    if not any(path for pattern in file_patterns for path in folder.glob(pattern)):
        raise UsageError(f"--model: {folder} has no tokenizer: none of {', '.join(file_patterns)}")
    try:
        tokenizer = _read_tokenizer(folder)
    except Exception as error:
        raise UsageError(f"--model: the tokenizer of {folder}: {one_line(error, 240)}") from error
    if tokenizer.pad_token_id is None:
        raise UsageError(f"--model: the tokenizer of {folder} has no padding token")
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"--model: the tokenizer of {folder} has {len(tokenizer)} tokens, but the encoder "
            f"knows only {config.vocab_size}"
        )
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    if context_length is not None and context_length > longest:
        raise UsageError(
            f"--force-context-length {context_length}: {folder} has positions for {longest}"
        )
    length = context_length or int(min(CONTEXT_LENGTH, longest, tokenizer.model_max_length))
    return FolderTokenizer(folder, int(tokenizer.pad_token_id), length)


def check_padding(tokenizer: FolderTokenizer) -> None:
    """Check that texts have no token of padding of their own, as those are masked by token.

    Raises:
        UsageError: the tokenizer ends each text with it, as those of some decoders do.
    """
    own = _read_tokenizer(tokenizer.folder)
    if tokenizer.pad in own("a")["input_ids"]:
        raise UsageError(
            f"--model: the tokenizer of {tokenizer.folder} puts its padding token, "
            f"{own.pad_token}, into each text, where it would be masked too; expected another "
            "pad_token in its tokenizer_config.json"
        )
