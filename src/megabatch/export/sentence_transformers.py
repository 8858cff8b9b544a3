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

_POOLING: dict[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}


def write(opened: Opened, folder: Path) -> list[str]:
    """Write a model whose `encode` gives normalised embeddings; see `Writer`.

    Two encoders become two models, in the folders `query` and `document`.
    """
    pair: Any = opened.towers.module
    tokenizer: Any = opened.towers.tokenizer
    notes = _differences(opened)
    if pair.text is None:
        _write_model(pair.visual, tokenizer, folder)
        return notes
    for side, encoder in (("query", pair.visual), ("document", pair.text)):
        (folder / side).mkdir()
        _write_model(encoder, tokenizer, folder / side)
    return [*notes, "there are two models, in its folders query and document: load each of them"]


def _write_model(encoder: TextEncoder, tokenizer: FolderTokenizer, folder: Path) -> None:
    save_encoder(encoder, tokenizer, folder)
    settings: dict[str, Any] = {"max_seq_length": tokenizer.context_length, "do_lower_case": False}
    if left_out := without_pooler(encoder):
        settings["model_args"] = left_out
    write_json(folder / "sentence_bert_config.json", settings)
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules.items())
    ]
    write_json(folder / "modules.json", listed)
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()  # it has no files, but its folder is looked for
    model: Any = encoder.encoder
    modes = {name: kind == encoder.pooling for kind, name in _POOLING.items()}
    settings = {"word_embedding_dimension": int(model.config.hidden_size), **modes}
    write_json(folder / "1_Pooling" / "config.json", settings)
    settings = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", settings)


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
