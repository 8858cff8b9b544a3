"""Whole evaluations of untrained and collapsed models, on glyphs and on other pairs."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.evaluation import evaluate_run
from megabatch.evaluation.config import EvalConfig
from megabatch.evaluation.run import open_tasks, prefixing
from megabatch.evaluation.run_folder import Opened
from megabatch.models import create
from tests.evaluation.material import image_folder
from tests.evaluation.page import Page
from tests.models.tiny import TINY


def test_glyphs_are_evaluated_and_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"step": s, "samples": s * 64, "loss": 6 / s} for s in range(1, 13)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert main(["eval", str(run), "--batch-size", "256"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("model.safetensors):")
    assert lines[1].startswith("  held-out faces: 348 images")
    assert max(map(len, lines[3:])) <= 80 + len(str(run))
    assert [line.split()[0] for line in lines if "%" in line] == ["model", "chance"] * 4
    assert lines[-1].endswith(f"report: {run / 'report.html'}")
    evaluation = json.loads((run / "evaluation.json").read_text())

    faces, characters = evaluation["retrieval"]["faces"], evaluation["retrieval"]["characters"]
    assert {faces["protocol"], characters["protocol"]} < {*lines}
    assert characters["protocol"].endswith("right answer over all names, equal ones as one")
    assert faces["texts"] < characters["texts"]  # some names against all
    assert faces["chance"]["image_to_text/recall@1"] == pytest.approx(1 / faces["texts"])

    html = (run / "report.html").read_text()
    page = Page(html)
    assert page.open == []
    for text in ("held-out faces", "held-out characters", "chance", "glyph-small", "a <b> run"):
        assert text in page.text
    assert len(page.pictures_of) >= 100
    assert "loss, from 6 to 0.5" in page.attributes["aria-label"]
    assert len(html) < 700_000
    (run / "report.html").unlink()
    (run / "model.safetensors").unlink()
    assert main(["report", str(run)]) == 0  # needs no model
    assert (run / "report.html").read_text() == html
    assert f"{100 * faces['model']['image_to_text/recall@10']:.2f}%" in page.text


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    """Twelve pictures of three captions, one picture damaged, one caption empty."""
    lines = ["filepath,title"]
    for i in range(12):
        Image.new("RGB", (40, 30), (20 * i, 255 - 20 * i, 90)).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{['red', 'green', 'blue'][i % 3]}")
    (tmp_path / "3.png").write_bytes(b"no image")
    lines[5] = "4.png,"
    lines.append(lines[6])  # a row twice is one caption
    (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "pairs.csv"


def test_other_pairs_are_evaluated_among_their_own_captions(run: Path, csv: Path) -> None:
    (run / "config.toml").write_text(f'model = "{TINY}"\ntrain_data = "shards/"\n')
    save_file(create(TINY).module.state_dict(), run / "model.safetensors")
    evaluation = evaluate_run(run, val_data=str(csv), batch_size=4, precision="bf16")
    assert evaluation["zero_shot"] == {}
    assert json.loads((run / "evaluation.json").read_text()) == evaluation
    task = evaluation["retrieval"]["pairs"]
    assert (task["images"], task["texts"]) == (10, 3)
    assert sum(task["skipped"].values()) == 2
    assert task["chance"]["image_to_text/recall@1"] == pytest.approx(1 / 3)
    assert task["model"]["image_to_text/recall@5"] == pytest.approx(1)
    assert "left out:" in (run / "report.html").read_text()


def test_the_tasks_follow_the_data_that_are_named(run: Path, csv: Path, tmp_path: Path) -> None:
    towers = create("glyph-small")
    folder = str(image_folder(tmp_path / "classes", 1))

    def keys(config: dict[str, Any], **settings: Any) -> list[str]:
        opened = Opened(towers, None, run, config)
        return [task.key for task in open_tasks(EvalConfig(run=run, **settings), opened)]

    builtin, shards = ["faces", "characters"], {"train_data": "shards/"}
    assert keys({"train_data": "glyphs"}) == builtin
    assert keys({**shards, "val_data": "glyphs"}) == builtin
    assert keys(shards, val_data="glyphs", class_data=folder) == [*builtin, "classes"]
    assert keys({"train_data": "glyphs"}, class_data=folder) == ["classes"]
    assert keys({"train_data": "glyphs", "val_data": str(csv)}) == ["pairs"]
    with pytest.raises(UsageError, match=r"trained on shards/: give held-out .* --class-data"):
        keys(shards)
    with pytest.raises(UsageError, match=r"val_data = 'pipe:cat x.tar' would run code"):
        keys({**shards, "val_data": "pipe:cat x.tar"})
    with pytest.raises(UsageError, match=r"--csv-query-key: .* takes images with te"):
        keys(shards, val_data="glyphs", csv_query_key="a")


def test_texts_get_the_prefixes_of_the_run_s_first_source_or_those_given(run: Path) -> None:
    made: dict[str, Any] = {"eval_transform": str.upper, "tokenizer": list}
    towers = replace(create("glyph-small"), **made)
    settings = {"query_prefix": "q: ::other: ", "caption_prefix": r"Doc\n::"}

    def texts(**given: str) -> tuple[object, object]:
        opened = Opened(towers, None, run, settings)
        found = prefixing(opened, EvalConfig(run=run, **given))  # type: ignore[arg-type]
        first, second = pickle.loads(pickle.dumps((found.eval_transform, found.tokenizer)))
        return first("a"), second(["b", "c"])

    assert texts() == ("Q: A", ["Doc\nb", "Doc\nc"])
    assert texts(query_prefix="x ", caption_prefix="y ") == ("X A", ["y b", "y c"])


def test_figures_are_never_beside_the_examples_of_an_earlier_evaluation(
    run: Path, csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    (run / "report.json").write_text("of an earlier one")
    monkeypatch.setattr("megabatch.evaluation.run.write_report", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate_run(run, val_data=str(csv))
    assert (run / "evaluation.json").exists()
    assert not (run / "report.json").exists()


def test_weights_that_are_not_finite_are_refused(run: Path) -> None:
    state = load_file(run / "model.safetensors")
    state["visual.projection.bias"][0] = torch.nan
    save_file(state, run / "model.safetensors")
    with pytest.raises(UsageError, match="not finite"):
        evaluate_run(run)
