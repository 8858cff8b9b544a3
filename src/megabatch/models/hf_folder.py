"""What is read out of a folder that transformers' `save_pretrained` wrote."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.extras import named_extras

#: Tokens a text where nothing else is said: longer ones cost time for every short one.
CONTEXT_LENGTH = 128


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


@lru_cache(maxsize=4)
def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def read_config(folder: Path) -> Any:
    """A folder's configuration, as transformers has it.

    Raises:
        UsageError: transformers is not installed, or cannot read it.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"--model: {folder} is no folder of a Hugging Face model: no config.json")
    with named_extras():
        import tokenizers  # noqa: F401  (transformers' own message without it is about types)
        import transformers
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the architecture's own code raises
        raise UsageError(f"--model: {folder} cannot be read: {one_line(error)}") from error


def read_model(folder: Path, config: Any, unused: str = "") -> Any:
    """A folder's model in float32; with random weights where the folder has none.

    unused: what the names of tensors that nobody needs contain; they may be missing.

    Raises:
        UsageError: transformers cannot read it, or some of its weights are missing.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    missing: list[str] = []
    try:
        if has_weights(folder):
            model, found = transformers.AutoModel.from_pretrained(
                folder, local_files_only=True, output_loading_info=True
            )
            missing = sorted(n for n in found["missing_keys"] if not (unused and unused in n))
        else:
            model = transformers.AutoModel.from_config(config)
    except Exception as error:  # whatever the architecture's own code raises
        raise UsageError(f"--model: {folder} cannot be read: {one_line(error)}") from error
    if missing:  # transformers would go on with random ones
        raise UsageError(
            f"--model: {folder} lacks {len(missing)} tensors of its model, such as {missing[0]}"
        )
    whole: Any = model.float()  # whatever it was stored in
    return whole


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a model's weights and not only its configuration."""
    return any(folder.glob("*.safetensors*")) or any(folder.glob("pytorch_model*.bin*"))


def read_tokenizer(folder: Path, config: Any, context_length: int | None) -> FolderTokenizer:
    """A folder's tokenizer, for a text encoder of this configuration.

    Raises:
        UsageError: there is none, it does not belong to the encoder, or the length is too long.
    """
    # Without any of them transformers makes one up, of a handful of special tokens.
    files_of_one = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
    if not any(path for pattern in files_of_one for path in folder.glob(pattern)):
        raise UsageError(f"--model: {folder} has no tokenizer: none of {', '.join(files_of_one)}")
    try:
        tokenizer = _read_tokenizer(folder)
    except Exception as error:
        raise UsageError(f"--model: the tokenizer of {folder}: {one_line(error)}") from error
    if tokenizer.pad_token_id is None:
        raise UsageError(f"--model: the tokenizer of {folder} has no token of padding")
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


def one_line(error: Exception) -> str:
    """What an error says, shortened to what fits a line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."
