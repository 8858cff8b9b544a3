"""The commands and the Python of docs/export.md run."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.cli import main
from tests.docs.pages import blocks
from tests.export.runs import change_json, write_run
from tests.models.tiny import TINY
from tests.models.tiny_bert import save_tiny_bert
from tests.models.tiny_clip import save_tiny_clip

PAGE = "docs/export.md"


def test_the_commands_and_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers", minversion="5.4")
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/vit"), TINY)
    shutil.copyfile("runs/vit/model.safetensors", "runs/vit/model-ema.safetensors")
    clip = save_tiny_clip(tmp_path / "clip", "clip")
    change_json(clip / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    write_run(Path("runs/clip"), f"hf:{clip}")
    retriever = write_run(Path("runs/retriever"), f"hf:{save_tiny_bert(tmp_path / 'bert')}")
    [commands] = blocks(PAGE, "bash")
    for command in commands.splitlines():
        assert main(shlex.split(command, comments=True)[1:]) == 0
    assert Path("exported/vit-ema/open_clip_model.safetensors").is_file()
    names: dict[str, Any] = {}
    for block in blocks(PAGE, "python"):
        exec(block, names)
    assert names["outputs"].text_embeds.shape == names["outputs"].image_embeds.shape == (1, 8)
    expected = retriever.module.encode_text(retriever.tokenizer(["a b c", "d e"]), normalize=True)
    torch.testing.assert_close(
        torch.from_numpy(names["embeddings"]), expected.detach(), atol=1e-6, rtol=0
    )
