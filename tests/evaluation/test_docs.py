"""The programs in docs/evaluation.md run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megabatch.cli import main
from megabatch.evaluation.captions import open_captioned
from tests.docs.pages import blocks
from tests.evaluation.material import captions, write_pictures

PAGE = "docs/evaluation.md"


def test_the_example_runs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/quickstart").symlink_to(run)
    export, _, from_python = blocks(PAGE, "python")
    exec(export, {})
    commands = [
        line for block in blocks(PAGE, "bash") for line in block.splitlines() if "digits" in line
    ]
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
    assert Path("evaluation/digits/report.html").is_file()
    assert Path("evaluation/pairs/evaluation.json").is_file()
    exec(from_python, {})


def test_tables_of_coco_s_and_karpathy_s_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names, texts = write_pictures(Path("val2017"), 5), captions(5)
    coco = {
        "images": [{"id": 70 + i, "file_name": names[i]} for i in range(5)],
        "annotations": [{"image_id": 70 + i, "caption": t} for i in range(5) for t in texts[i]],
    }
    Path("annotations").mkdir()
    Path("annotations/captions_val2017.json").write_text(json.dumps(coco))
    Path("flickr30k-images").symlink_to("val2017")
    images = [
        {"filename": name, "split": split, "sentences": [{"raw": text} for text in of_image]}
        for split in ("test", "train")
        for name, of_image in zip(names, texts, strict=True)
    ]
    Path("dataset_flickr30k.json").write_text(json.dumps({"images": images}))
    exec(blocks(PAGE, "python")[1], {})
    for table in ("coco.jsonl", "flickr30k.jsonl"):
        data = open_captioned(table)
        assert [data[i].target for i in range(len(data))] == texts
