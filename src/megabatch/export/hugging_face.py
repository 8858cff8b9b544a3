"""Folders as `save_pretrained` of transformers and of sentence-transformers writes them.

The latter are written without the library: models with one vector per text in the format of
releases before 6, which newer ones read too, and those with one per token in that of 6.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megabatch.data.sources import split_prefixes
from megabatch.evaluation.run_folder import Opened
from megabatch.models.hf_images import PROCESSORS
from megabatch.models.huggingface import FolderTokenizer, TextEncoder, TokenEncoder, read_config
from megabatch.models.padding import Pooling
from megabatch.training.checkpoint import save_tensors

_POOLING: dict[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}
_POOLED: dict[Pooling, str] = {
    "mean": "the mean over the tokens",
    "cls": "the first token",
    "last": "the last token",
}
#: sentence-transformers' modules.
_OF_TEXTS = {
    kind: f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Normalize")
}
_OF_TOKENS = {
    "Transformer": "sentence_transformers.base.modules.Transformer",
    "Dense": "sentence_transformers.base.modules.Dense",
    "MultiVectorMask": "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask",
    "Normalize": "sentence_transformers.base.modules.Normalize",
}


def write_encoder(opened: Opened, folder: Path) -> list[str]:
    """Write a text encoder and its tokenizer; see `Writer`."""
    module: Any = opened.towers.module
    tokenizer: Any = opened.towers.tokenizer
    _save_encoder(module.visual, tokenizer, folder)
    note = (
        "the folder has the encoder alone: an embedding is "
        f"{_POOLED[module.visual.pooling]} of its last hidden states, normalised"
    )
    if _without_pooler(module.visual):
        note += "; add_pooling_layer=False loads it without a pooler, which no embedding uses"
    return [note]


def _without_pooler(encoder: TextEncoder | TokenEncoder) -> dict[str, bool]:
    """The arguments with which `AutoModel` loads a saved encoder without a pooler."""
    parameters = inspect.signature(type(encoder.encoder)).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}


def _save_encoder(
    encoder: TextEncoder | TokenEncoder, tokenizer: FolderTokenizer, folder: Path
) -> None:
    """Save an encoder as `AutoModel` loads it, and its tokenizer; without a pooler, if it has one.

    No feature uses it. See `_without_pooler`.
    """
    model: Any = encoder.encoder
    model.save_pretrained(folder)
    _save_tokenizer(tokenizer, folder)


def _save_tokenizer(tokenizer: FolderTokenizer, folder: Path) -> None:
    """Save a tokenizer that truncates texts to the run's context length."""
    from transformers import AutoTokenizer

    # Read again: the one in use also stores its padding and truncation.
    own = AutoTokenizer.from_pretrained(tokenizer.folder, local_files_only=True)
    own.model_max_length = tokenizer.context_length
    own.save_pretrained(folder)


def write_clip(opened: Opened, folder: Path) -> list[str]:
    """Write a model of images and texts, its tokenizer and image processor; see `Writer`."""
    import transformers

    module: Any = opened.towers.module
    tokenizer: Any = opened.towers.tokenizer
    model = transformers.AutoModel.from_config(read_config(tokenizer.folder)).float()
    state = {
        name.removeprefix("visual.").removeprefix("text."): value
        for name, value in module.state_dict().items()
    }
    notes = save_clip(model, state, folder)
    _save_tokenizer(tokenizer, folder)
    for name in PROCESSORS:
        if (tokenizer.folder / name).is_file():
            shutil.copyfile(tokenizer.folder / name, folder / name)
    return notes


def save_clip(model: Any, state: dict[str, Tensor], folder: Path) -> list[str]:
    """Save a model of images and texts with these weights; returns a note if it loses a bias."""
    bias = None if hasattr(model, "logit_bias") else state.pop("logit_bias", None)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    if bias is None:
        return []
    return [
        f"{type(model).__name__} has no logit bias: the run's, {float(bias):.4g}, is left out; "
        "embeddings do not depend on it"
    ]


# --- sentence-transformers ------------------------------------------------------------------------


def write_sentence_model(opened: Opened, folder: Path) -> list[str]:
    """Write a model whose `encode` gives normalised embeddings, of texts or tokens; see `Writer`.

    Two encoders become two models, in the folders `query` and `document`.
    """
    pair: Any = opened.towers.module
    tokenizer: Any = opened.towers.tokenizer
    notes = _differences(opened)
    if pair.text is None:
        _write_model(pair.visual, tokenizer, folder, opened.config)
        return notes
    for side, encoder in (("query", pair.visual), ("document", pair.text)):
        (folder / side).mkdir()
        _write_model(encoder, tokenizer, folder / side, opened.config)
    return [*notes, "there are two models, in its folders query and document: load each of them"]


def _write_model(
    encoder: TextEncoder | TokenEncoder,
    tokenizer: FolderTokenizer,
    folder: Path,
    config: Mapping[str, Any],
) -> None:
    _save_encoder(encoder, tokenizer, folder)
    settings: dict[str, Any] = {"max_seq_length": tokenizer.context_length, "do_lower_case": False}
    if left_out := _without_pooler(encoder):
        settings["model_args"] = left_out
    write_json(folder / "sentence_bert_config.json", settings)
    # For encode_query and encode_document, and MTEB: the run's, of its first source.
    sides = {"query": "query_prefix", "document": "caption_prefix"}
    prompts = {side: split_prefixes(config[k])[0] for side, k in sides.items() if k in config}
    settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    if isinstance(encoder, TokenEncoder):
        _write_modules(_OF_TOKENS, folder)
        _write_token_settings(encoder, folder)
        settings |= {"similarity_fn_name": "maxsim", "model_type": "MultiVectorEncoder"}
    else:
        _write_modules(_OF_TEXTS, folder)  # Normalize has no files, but its folder is looked for
        model: Any = encoder.encoder
        modes = {name: kind == encoder.pooling for kind, name in _POOLING.items()}
        pooling = {"word_embedding_dimension": int(model.config.hidden_size), **modes}
        write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "config_sentence_transformers.json", settings)


def _write_modules(types: Mapping[str, str], folder: Path) -> None:
    """List the modules and make their folders, `1_Pooling` and so on; the first one has none."""
    listed = []
    for i, (kind, name) in enumerate(types.items()):
        path = f"{i}_{kind}" if i else ""
        (folder / path).mkdir(exist_ok=True)
        listed.append({"idx": i, "name": str(i), "path": path, "type": name})
    write_json(folder / "modules.json", listed)


def _write_token_settings(encoder: TokenEncoder, folder: Path) -> None:
    """Write the projection of states to tokens' features, and that all tokens count."""
    weight, place = encoder.projection.weight, {"module_input_name": "token_embeddings"}
    dense = {
        **{"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False},
        "activation_function": "torch.nn.modules.linear.Identity",
        **place,
    }
    write_json(folder / "1_Dense" / "config.json", dense)
    save_tensors({"linear.weight": weight.detach()}, folder / "1_Dense" / "model.safetensors")
    write_json(folder / "2_MultiVectorMask" / "config.json", {"skiplist_words": []})
    write_json(folder / "3_Normalize" / "config.json", place)


def _differences(opened: Opened) -> list[str]:
    """Differences between the padding of the two libraries that the embeddings may show."""
    from transformers import AutoTokenizer

    tokenizer: Any = opened.towers.tokenizer
    own = AutoTokenizer.from_pretrained(tokenizer.folder, local_files_only=True)
    if opened.towers.lengths and own.padding_side == "right":
        return []
    return [
        f"features of {opened.towers.name} may depend on padding: the run padded texts to "
        f"{tokenizer.context_length} tokens, sentence-transformers pads to the longest of a batch"
    ]


def write_json(path: Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Write a file of settings."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
