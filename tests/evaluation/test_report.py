"""The report: its content from features, its charts, the pages of one run and of several."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.evaluation.report.content import encode, galleries
from megabatch.evaluation.report.page import COLOURS, make_page
from megabatch.evaluation.retrieval import answers_by_pairs
from megabatch.evaluation.run import write_report
from megabatch.evaluation.samples import Sample, Samples
from megabatch.evaluation.tasks import Matched
from tests.evaluation.material import ImageList, picture
from tests.evaluation.page import Page

HOSTILE = "<script>alert(1)</script>\"'&$\\frac$"
WAYS = ("image_to_text", "text_to_image")


# Examples.


class Texts(Samples):
    """Pairs of texts, some of them long."""

    first = "text"

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Sample:
        return Sample(f"query {index} {'x' * 20 * index}", [f"answer {index}"], str(index))


def test_queries_show_the_five_best_answers_and_the_best_right_one() -> None:
    """Five more answers belong to no query."""
    torch.manual_seed(0)
    scores, ids = torch.randn(30, 35), torch.arange(30)
    matched = Matched(
        *("texts", Texts(), ids.tolist(), torch.eye(30)),
        *([f"answer {i}" for i in range(35)], scores.T, answers_by_pairs(ids, ids, 30, 35)),
    )
    for gallery, matrix in zip(galleries(matched), (scores, scores.T), strict=True):
        assert len(gallery["examples"]) == 12
        for query in gallery["examples"]:
            i = int(query["text"].split()[1])
            assert i < 30
            ranked = matrix[i].argsort(descending=True).tolist()
            rank = 1 + ranked.index(i)
            assert query["rank"] == rank
            shown = [*enumerate(ranked[:5], 1), *([(rank, i)] if rank > 5 else [])]
            found = [(a["rank"], int(a["text"].split()[1])) for a in query["answers"]]
            assert found == shown
            assert [a["right"] for a in query["answers"]] == [j == i for _, j in shown]
            assert max(len(one["text"]) for one in (query, *query["answers"])) <= 400
            assert {one["picture"] for one in (query, *query["answers"])} == {None}


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "I;16"])
def test_pictures_of_any_mode_become_small_and_small_ones_keep_their_pixels(mode: str) -> None:
    for size, smaller, kind in (((300, 150), (128, 64), "jpeg"), ((32, 32), (32, 32), "png")):
        image = Image.new(mode, size)
        picture = encode(image)
        assert picture["kind"] == kind
        assert len(picture["data"]) < 12_000
        with Image.open(io.BytesIO(base64.b64decode(picture["data"]))) as decoded:
            assert decoded.size == smaller
            assert decoded.format == kind.upper()
            assert kind == "jpeg" or decoded.tobytes() == image.convert(decoded.mode).tobytes()


# Pages.


def figures(recall: float, rank: float) -> dict[str, float]:
    of_way = {f"recall@{k}": recall for k in (1, 5, 10)} | {"median_rank": rank, "queries": 8}
    return {f"{way}/{key}": value for way in WAYS for key, value in of_way.items()}


def write_evaluation(
    folder: Path, *, recall: float = 0.5, title: str = HOSTILE, step: int | None = None
) -> None:
    shared = {"title": title, "prompts": title, "first": "image", "images": 8, "damage": [title]}
    accuracy = [{"top1": r, "top5": 0.9, "mean_per_class_recall": r} for r in (recall, 0.5)]
    pairs = {"texts": 8, "model": figures(recall, 4 - recall), "chance": figures(0.1, 4)}
    classes = {"classes": 2, "model": accuracy[0], "chance": accuracy[1]}
    evaluation = {
        "run": {"model": title, "parameters": 10_000, "weights": title, "step": step},
        "retrieval": {"pairs": {**shared, **pairs}},
        "zero_shot": {"classes": {**shared, **classes}},
        "date": "2026-01-02T03:04:05+00:00",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps(evaluation))


def write_run(
    folder: Path, *, settings: str = 'model = "m"\nglobal_batch_size = 64\n', **logged: float
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(settings)
    records = [
        {"step": step, "samples": 64 * step} | {key: v / step for key, v in logged.items()}
        for step in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def written(*folders: Path) -> tuple[str, Page]:
    html = make_page(folders)
    return html, Page(html)


def labels(page: Page) -> list[str]:
    return [label for label in page.attributes["aria-label"] if label]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run all of whose names, captions, settings and notes look like HTML."""
    setting = json.dumps(HOSTILE)
    run = write_run(
        tmp_path_factory.mktemp("evaluated") / "<script>alert(1)",
        settings=f"model = {setting}\ntrain_data = {setting}\nglobal_batch_size = 4096\n",
        **{"loss": 6, "lr": 1e-3, "grad_norm": 2, "logit_scale": 14, "pairs_per_second": 9},
    )
    write_evaluation(run)
    images, ids = ImageList([picture(i % 4, i) for i in range(8)]), torch.arange(8)
    texts = [f"text {i} {HOSTILE}" for i in range(8)]
    pairs = answers_by_pairs(ids, ids, 8, 8)
    write_report(
        run, [Matched(HOSTILE, images, ids.tolist(), torch.eye(8), texts, torch.eye(8), pairs)]
    )
    return run


def test_the_page_has_every_part_escapes_all_texts_and_loads_nothing(evaluated: Path) -> None:
    html = (evaluated / "report.html").read_text()
    page = Page(html)  # which refuses a script
    assert html == make_page([evaluated])
    assert "<script>alert" not in html
    assert "\"'&$" not in html
    assert page.open == []
    assert page.text.count("<script>alert(1)") > 50
    assert any(HOSTILE in (alt or "") for alt in page.attributes["alt"])
    assert not any(name.startswith("on") for name in page.attributes)
    assert page.pictures_of
    assert all(source.startswith(("data:image/", "#")) for source in page.sources)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", html)
    for text in ("4,096", "10,000", "R@10", "top-5", "Image → text", "Text → image"):
        assert text in page.text
    ids = [set(re.findall(r"[(\"]#([a-z0-9]+)", svg)) for svg in html.split("<svg")[1:]]
    assert len(ids) == 5
    assert len(set.union(*ids)) == sum(map(len, ids)) > 0  # charts refer to their own parts alone
    for start in ("loss, from 6 to 2", "learning rate,", "gradient norm,", "logit scale (1 / temp"):
        assert any(label.startswith(start) for label in labels(page))
    light, dark = html.split("prefers-color-scheme: dark", 1)
    for name in set(re.findall(r"var\((--[a-z]+)\)", html)):
        assert f"{name}: #" in light
        assert f"{name}: #" in dark


def test_a_long_curve_takes_little_space_and_gaps_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    values = [*np.random.default_rng(0).normal(size=50_000).tolist(), None, float("nan")]
    lines = [json.dumps({"step": step, "loss": v}) for step, v in enumerate([2.0, *values, 3.0])]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    html, page = written(run)
    assert labels(page) == ["loss, from 2 to 3"]
    assert len(html) < 70_000


def test_evaluations_during_the_training_have_curves_for_each_data(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", loss=3)
    values = [(2, None, 0.1), (3, None, 0.2), (4, "a.csv", 0.9), (6, "a.csv", 0.8), (6, "b", 0.3)]
    names = [f"pairs/{way}/recall@{k}" for way in WAYS for k in (1, 10)]
    lines = [{"step": s, "val_data": data, **dict.fromkeys(names, v)} for s, data, v in values]
    for some, suffixes in (
        (lines[:2], {"": "0.1 to 0.2"}),
        (lines, {"": "0.1 to 0.2", ", on a.csv": "0.9 to 0.8"}),
    ):
        (run / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))
        drawn = [label for label in labels(written(run)[1]) if label.startswith("validation")]
        assert sorted(drawn) == sorted(
            f"validation: pairs, {way.replace('_', ' ')}, recall@1{suffix}, from {ends}"
            for way in WAYS
            for suffix, ends in suffixes.items()
        )


def test_figures_of_a_step_before_the_last_one_are_said_to_be(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", loss=3)  # three steps
    assert "not evaluated yet" in written(run)[1].text
    for step, told in ((2, "evaluated at step 2, trained to step 3."), (3, ""), (None, "")):
        write_evaluation(run, step=step)
        _, page = written(run)
        assert ("figures of earlier weights" in page.text) == bool(told)
        assert told in page.text
        assert "50.00%" in page.text


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", loss=3)
    for name, text in (
        ("report", '{"tasks": [{}]}'),
        ("evaluation", '{"run": {}, "retrieval": 3}'),
        ("evaluation", "{"),
    ):
        write_evaluation(run)
        (run / f"{name}.json").write_text(text)
        message = r"^[^\n]*run: evaluation\.json or report\.json .*again[^\n]*$"
        with pytest.raises(UsageError, match=message):
            make_page([run])
        (run / f"{name}.json").unlink()


# Several runs.


def test_curves_figures_and_settings_are_compared(tmp_path: Path) -> None:
    settings = 'model = "m"\noutput = "{}"\nlr = {}\nlock_image = {}\n'
    logged = {"loss": 6.0, "lr": 1e-3, "grad_norm": 1.0, "logit_scale": 9.0, "pairs_per_second": 5}
    a = write_run(tmp_path / "a", settings=settings.format("a", 0.1, "true"), **logged)
    b = write_run(tmp_path / "b", settings=settings.format("b", 0.2, "false"), **logged)
    write_evaluation(a, recall=0.25, title="held-out", step=2)
    write_evaluation(b, recall=0.75, title="held-out")
    html, page = written(a, b)
    assert page.open == []
    assert "loss, from 6 to 2; from 6 to 2" in labels(page)
    assert all(colour in html for colour in COLOURS[:2])
    assert html.count(">pairs seen</text>") == len(labels(page)) == 5
    text = " ".join(re.sub("<[^>]*>", " ", html).split())
    assert "held-out, image → text: 8 among 8 R@1 R@5 R@10 median rank" in text
    assert "b, model 75.00% 75.00% 75.00% 3.2" in text
    assert "a has figures of earlier weights: evaluated at step 2, trained to" in page.text
    facts, differing = text.split("Settings that differ")
    assert " loss 2 2 " in facts
    assert differing.endswith(" lr 0.1 0.2 lock_image true false")


def test_runs_of_one_name_are_told_apart_and_names_are_escaped(tmp_path: Path) -> None:
    name = "<script>alert(1)"
    folders = [tmp_path / part / name for part in ("x", "y")] + [tmp_path / "$\\frac"]
    for folder in folders:
        write_run(folder, settings=f'train_data = "<script>{folder.parent.name}"\n', loss=1)
    write_evaluation(folders[0])
    (folders[1] / "metrics.jsonl").unlink()
    html, page = written(*folders)
    assert "<script" not in html
    for text in (f"x/{name}", f"y/{name} is not evaluated yet", "$\\frac", "<script>x", HOSTILE):
        assert text in page.text


# The command.


def test_a_run_s_page_and_a_comparison_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(write_run(tmp_path / name, loss=3)) for name in "ab"]
    assert main(["report", runs[0]]) == 0
    assert capsys.readouterr().out == f"report: {runs[0]}/report.html\n"
    output = tmp_path / "new" / "both.html"
    assert main(["report", *runs, "--output", str(output)]) == 0
    assert "2 runs compared" in output.read_text()
    assert main(["report", "--output", str(output), runs[0]]) == 0
    assert output.read_text() == (tmp_path / "a" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "--output: needed to compare several runs"),
        (["missing"], "missing is not a folder"),
        (["a", "--output", "empty"], "empty cannot be written: Is a directory"),
        (["a", "--output", "a/config.toml/x.html"], "a/config.toml/x.html cannot be written: "),
        (["a", "empty", "--output", "x.html"], "empty is not a run: it has neither config.toml"),
    ],
)
def test_user_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", loss=3)
    (tmp_path / "empty").mkdir()
    assert main(["report", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"megabatch report: {message}")
    assert err.count("\n") == 1
    assert not (tmp_path / "x.html").exists()
