from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from megabatch.errors import UsageError
from megabatch.evaluation.report.page import make_page
from tests.evaluation.page import Page
from tests.evaluation.report.conftest import HOSTILE, write_evaluation, write_run


def written(folder: Path) -> tuple[str, Page]:
    html = make_page(folder)
    return html, Page(html)


@pytest.fixture(scope="module")
def hostile(evaluated_once: Path) -> tuple[str, Page]:
    return written(evaluated_once)


def test_names_captions_and_settings_are_escaped_everywhere(hostile: tuple[str, Page]) -> None:
    html, page = hostile  # Page refuses a script
    assert "<script>alert" not in html
    assert "\"'&$" not in html
    assert page.open == []
    assert page.text.count("<script>alert(1)") > 50
    assert any(HOSTILE in (alt or "") for alt in page.attributes["alt"])
    assert not any(name.startswith("on") for name in page.attributes)
    assert set(page.attributes) >= {"aria-label", "title", "src"}


def test_a_long_path_does_not_widen_a_table(hostile: tuple[str, Page]) -> None:
    html, _ = hostile  # on a phone the figures would be beyond the edge
    assert re.search(r"tr\.heading td \{[^}]*overflow-wrap: anywhere", html)


def test_the_page_loads_nothing(hostile: tuple[str, Page]) -> None:
    html, page = hostile
    assert page.pictures_of
    assert all(source.startswith(("data:image/", "#")) for source in page.sources)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", html)
    links = {source[1:] for source in page.sources if source.startswith("#")}
    assert {"figures", "training", "similarities", "task-1", "task-2", "configuration"} <= links
    assert links <= set(page.attributes["id"])


def test_every_part_is_there(hostile: tuple[str, Page]) -> None:
    _, page = hostile
    for text in ("4,096, micro-batches of 512", "final loss", "2.0000", "Similarities"):
        assert text in page.text
    for text in ("Image → text", "Text → image", "Confusions, ", "taken for", "1 of 2"):
        assert text in page.text
    assert "Not in this run's log" not in page.text
    labels = page.attributes["aria-label"]
    for start in ("loss, from 6 to 2", "learning rate,", "gradient norm,", "logit scale (1 / temp"):
        assert any((label or "").startswith(start) for label in labels)
    for part in ("cosines of positives", "queries with", "map of "):
        assert sum(part in (label or "") for label in labels) == 2


def test_values_that_were_not_logged_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old", loss=3, lr=1e-3)
    _, page = written(run)
    assert (
        "Not in this run's log: gradient norm, logit scale (1 / temperature), pairs per second."
        in page.text
    )
    assert "Not evaluated yet" in page.text


def test_evaluations_during_the_training_have_curves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", loss=3)
    figures = {f"pairs/{way}/recall@1": 0.25 for way in ("image_to_text", "text_to_image")}
    lines = [{"step": 2, **figures, "pairs/image_to_text/recall@10": 1}, {"step": 4, **figures}]
    (run / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, page = written(run)
    labels = [label for label in page.attributes["aria-label"] if label]
    assert "validation: pairs, image to text, recall@1, from 0.25 to 0.25" in labels
    assert sum(label.startswith("validation") for label in labels) == 2


def test_evaluations_on_other_data_have_curves_of_their_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", loss=3)
    values = [(2, None, 0.1), (4, "a.csv", 0.9), (6, "a.csv", 0.8), (6, "b.csv", 0.3)]
    lines = [{"step": s, "val_data": data, "pairs/x/recall@1": v} for s, data, v in values]
    (run / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    labels = [label or "" for label in written(run)[1].attributes["aria-label"]]
    for data, ends in (("the default data", "0.1 to 0.1"), ("a.csv", "0.9 to 0.8"),
                       ("b.csv", "0.3 to 0.3")):  # fmt: skip
        assert f"validation: pairs, x, recall@1, on {data}, from {ends}" in labels
    assert sum(label.startswith("validation") for label in labels) == 3


def test_figures_of_a_step_before_the_last_one_are_said_to_be(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", loss=3)  # three steps
    for step, told in ((2, "evaluated at step 2, trained to step 3"), (3, ""), (None, "")):
        write_evaluation(run, step=step)
        _, page = written(run)
        assert ("Of earlier weights" in page.text) == bool(told)
        assert told in page.text
        assert ("evaluated step" in page.text) == (step is not None)


def test_an_evaluation_of_an_older_version_lacks_examples(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old", loss=3)
    write_evaluation(run)
    _, page = written(run)
    assert "No similarities or examples were kept" in page.text
    assert "50.00%" in page.text


def test_the_page_of_an_evaluation_elsewhere_has_the_run_s_curves(
    evaluated: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "evaluations" / "new"
    elsewhere.mkdir(parents=True)
    for name in ("evaluation.json", "report.json"):
        shutil.move(evaluated / name, elsewhere / name)
    content = json.loads((elsewhere / "report.json").read_text())
    content |= {"run": f"../../{evaluated.name}", "tasks": []}  # whose charts take seconds
    (elsewhere / "report.json").write_text(json.dumps(content))
    _, page = written(elsewhere)
    assert evaluated.name in page.text
    assert any((label or "").startswith("loss, from 6") for label in page.attributes["aria-label"])
    shutil.rmtree(evaluated)
    assert "Training" not in written(elsewhere)[1].text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ('{"run": {}, "retrieval": 3}', "retrieval is not a table"),
        ("{}", "cannot be read: 'run'"),
    ],
)
def test_a_damaged_evaluation_is_named(tmp_path: Path, content: str, message: str) -> None:
    run = write_run(tmp_path / "run", loss=3)
    (run / "evaluation.json").write_text(content)
    with pytest.raises(UsageError, match=rf"evaluation\.json {message}|{message}"):
        make_page(run)
