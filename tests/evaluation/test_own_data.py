"""Whole evaluations of labelled images, of several captions per image, and with other weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.evaluation import evaluate_run
from megabatch.evaluation.captions import open_captioned
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.run_folder import open_run
from tests.evaluation.material import (
    caption_table,
    captions,
    class_shards,
    image_features,
    image_folder,
)
from tests.evaluation.page import Page
from tests.evaluation.test_retrieval import by_rights


def by_the_whole_matrix(first: Tensor, second: Tensor, right: Tensor) -> dict[str, float]:
    rights, back = ([row.nonzero().flatten().tolist() for row in r] for r in (right, right.T))
    found = by_rights(first, second, rights, back, [1, 5, 10])
    ways = {"x_to_y": "image_to_text", "y_to_x": "text_to_image"}
    return {f"{ways[key[:6]]}{key[6:]}": value for key, value in found.items()}


def test_several_captions_an_image_rank_as_by_the_whole_matrix(run: Path, tmp_path: Path) -> None:
    n = 40
    table = caption_table(tmp_path / "pairs", n)
    evaluation = evaluate_run(run, val_data=str(table), batch_size=16)
    task = evaluation["retrieval"]["pairs"]
    owners = torch.tensor([i for i, of_image in enumerate(captions(n)) for _ in of_image])
    assert (task["images"], task["texts"]) == (n, len(owners))
    assert task["protocol"].endswith("right answer over all captions, each of one image")

    encoder = Encoder(open_run(run).towers)
    data = open_captioned(str(table))
    images = image_features(encoder, [data[i].image for i in range(n)])
    texts = encoder.texts([text for of_image in captions(n) for text in of_image])
    assert len({text for of_image in captions(n) for text in of_image}) == len(owners)
    expected = by_the_whole_matrix(images, texts, torch.arange(n)[:, None] == owners)
    assert task["model"] == pytest.approx(expected, abs=1e-9)
    assert task["model"]["text_to_image/queries"] == len(owners)


def test_labelled_images_are_classified(run: Path, tmp_path: Path) -> None:
    test, out = image_folder(tmp_path / "test", 9), tmp_path / "out" / "here"
    (test / "digit_one" / "9.png").write_bytes(b"broken")
    (tmp_path / "names.txt").write_text("one\nthree\ntwo\nzero\n")  # as folders are sorted
    (tmp_path / "templates.txt").write_text("digit {}\na {}.\n")
    files = {"class_names": "names.txt", "templates": "templates.txt"}
    given = {name: str(tmp_path / file) for name, file in files.items()}
    evaluation = evaluate_run(run, class_data=str(test), output=out, **given)
    assert evaluation["retrieval"] == {}
    from_folders = evaluation["zero_shot"]["classes"]
    assert (from_folders["images"], from_folders["classes"]) == (36, 4)
    assert from_folders["skipped"] == {"undecodable image": 1}
    assert from_folders["chance"]["top1"] == 0.25
    assert from_folders["model"]["top5"] == 1
    assert json.loads((out / "evaluation.json").read_text()) == evaluation
    assert not (run / "evaluation.json").exists()
    page = Page((out / "report.html").read_text())
    assert page.open == []
    for text in (
        "mean per class",
        "text feature of each class's prompts (2 templates from ",
        "1 × undecodable image",
    ):
        assert text in page.text
    assert len(page.pictures_of) >= 8

    shards = class_shards(tmp_path / "wds", 9)  # with names and templates of their own
    from_shards = evaluate_run(run, class_data=str(shards))["zero_shot"]["classes"]
    templates = shards / "zeroshot_classification_templates.txt"
    source = f"from {templates}; class names: those of the data"
    assert from_shards["prompts"] == f"2 templates {source}"
    assert from_shards["model"] == pytest.approx(from_folders["model"])


def test_a_moving_average_is_evaluated_as_weights_of_a_run_and_of_a_model_by_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = class_shards(tmp_path / "a [/b] [red] :cat:", 3)  # markup, where rich is asked for it
    with pytest.raises(UsageError, match=r"has no model-ema\.safetensors"):
        evaluate_run(run, weights="ema", class_data=str(data))
    state, average = load_file(run / "model.safetensors"), run / "model-ema.safetensors"
    save_file({k: 0.5 * v for k, v in state.items()}, average)
    output = tmp_path / "out [/c]"
    options = ["--class-data", str(data), "--output", str(output), "--device", "cpu"]
    assert main(["eval", "--model", "glyph-small", "--pretrained", str(average), *options]) == 0
    out = capsys.readouterr().out
    assert f"{data}, zero-shot: 12 in 4 classes" in out
    assert "mean per class" in out
    assert f"report: {output}/report.html" in out
    by_name = json.loads((output / "evaluation.json").read_text())
    by_run = evaluate_run(run, weights="ema", class_data=str(data))
    assert by_name["zero_shot"] == by_run["zero_shot"]
    assert by_name["run"]["weights"] == by_run["run"]["weights"] == "model-ema.safetensors"


# Questions with one to three answers; an answer of one or two questions, which differ in others.
ASKED = [(i % 12, (i + i // 12) % 15) for i in range(28)]


def text_transform(text: str) -> Tensor:
    return torch.full((1, 32, 32), 20 * int(text.split()[1]), dtype=torch.uint8)


def test_pairs_of_texts_are_ranked_and_told_from_images(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_run(run)
    towers = replace(opened.towers, first="text", eval_transform=text_transform)
    monkeypatch.setattr(
        "megabatch.evaluation.run.open_run", lambda *_, **__: replace(opened, towers=towers)
    )
    table = caption_table(tmp_path / "pairs", 3)
    with pytest.raises(UsageError, match=r"takes texts with texts, but .*pairs\.csv has images"):
        evaluate_run(run, val_data=str(table))
    with pytest.raises(UsageError, match=r"^--class-data: .* takes texts with texts, not images$"):
        evaluate_run(run, class_data=str(tmp_path))
    with pytest.raises(UsageError, match="takes texts with texts, but glyphs has images"):
        evaluate_run(run)
    texts = tmp_path / "some texts.csv"
    lines = [f"question {question},answer {answer}\n" for question, answer in ASKED]
    texts.write_text("asked,title\n" + "".join(lines))
    evaluation = evaluate_run(run, val_data=str(texts), csv_query_key="asked")
    task = evaluation["retrieval"]["pairs"]
    assert (task["images"], task["texts"], evaluation["zero_shot"]) == (12, 15, {})
    assert task["protocol"].endswith("right answer over all second texts, equal ones as one")
    encoder = Encoder(towers)
    first = image_features(encoder, [f"question {i}" for i in range(12)])
    right = torch.tensor([[(i, j) in ASKED for j in range(15)] for i in range(12)])
    second = encoder.texts([f"answer {i}" for i in range(15)])
    assert task["model"] == pytest.approx(by_the_whole_matrix(first, second, right))
    page = Page((run / "report.html").read_text())
    assert "some texts.csv, first → second: 12 among 15" in page.text
    assert "First → second" in page.text
    assert "Second → first" in page.text
    assert page.pictures_of == []
