"""A folder as sentence-transformers' `save_pretrained` writes it.

It is written without the library, in the format of releases before 6, which newer ones read too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megabatch.evaluation.run_folder import Opened
from megabatch.export.hugging_face import save_encoder, without_pooler, write_json
from megabatch.models.huggingface import FolderTokenizer, TextEncoder
from megabatch.models.padding import Pooling

_MODULES = "sentence_transformers.models."
_POOLING: dict[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}


def write(opened: Opened, folder: Path) -> list[str]:
    """Write a model whose `encode` gives normalised embeddings; see `Writer`.

    Two encoders become a router: the first is that of `encode_query`, the second that of
    `encode_document`.
    """
    pair: Any = opened.towers.module
    tokenizer: Any = opened.towers.tokenizer
    notes = _differences(opened)
    if pair.text is None:
        _write_transformer(pair.visual, tokenizer, folder)
        _write_pooling(pair.visual, folder / "1_Pooling")
        modules = {"": "Transformer", "1_Pooling": "Pooling"}
    else:
        _write_router(pair, tokenizer, folder)
        modules = {"": "Router"}
        notes.append(
            "queries are encoded by encode_query, documents by encode_document (release 5 or newer)"
        )
    normalize = f"{len(modules)}_Normalize"
    (folder / normalize).mkdir()  # it has no files, but its folder is looked for
    modules[normalize] = "Normalize"
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": _MODULES + kind}
        for i, (path, kind) in enumerate(modules.items())
    ]
    write_json(folder / "modules.json", listed)
    settings: dict[str, Any] = {
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    write_json(folder / "config_sentence_transformers.json", settings)
    return notes


def _write_transformer(encoder: TextEncoder, tokenizer: FolderTokenizer, folder: Path) -> None:
    save_encoder(encoder, tokenizer, folder)
    settings: dict[str, Any] = {"max_seq_length": tokenizer.context_length, "do_lower_case": False}
    if left_out := without_pooler(encoder):
        settings["model_args"] = left_out
    write_json(folder / "sentence_bert_config.json", settings)


def _write_pooling(encoder: TextEncoder, folder: Path) -> None:
    folder.mkdir()
    model: Any = encoder.encoder
    modes = {name: kind == encoder.pooling for kind, name in _POOLING.items()}
    settings = {"word_embedding_dimension": int(model.config.hidden_size), **modes}
    write_json(folder / "config.json", settings)


def _write_router(pair: Any, tokenizer: FolderTokenizer, folder: Path) -> None:
    sides = {"query": pair.visual, "document": pair.text}
    for side, encoder in sides.items():
        inner = folder / f"{side}_0_Transformer"
        inner.mkdir()
        _write_transformer(encoder, tokenizer, inner)
        _write_pooling(encoder, folder / f"{side}_1_Pooling")
    kinds = {"0_Transformer": "Transformer", "1_Pooling": "Pooling"}
    settings = {
        "types": {f"{side}_{path}": _MODULES + kinds[path] for side in sides for path in kinds},
        "structure": {side: [f"{side}_{path}" for path in kinds] for side in sides},
        # Which of the two encoders a text is for is not guessed: plain `encode` raises.
        "parameters": {"default_route": None, "allow_empty_key": False},
    }
    write_json(folder / "router_config.json", settings)


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
