"""The report: its content from features, its charts, the pages of one run and of several."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from markupsafe import Markup
from PIL import Image
from sklearn.metrics import roc_auc_score

from megabatch.cli import main
from megabatch.data import Pair
from megabatch.data.glyphs import GlyphSet
from megabatch.errors import UsageError
from megabatch.evaluation.captions import JoinedTexts
from megabatch.evaluation.report import charts, content
from megabatch.evaluation.report.charts import series
from megabatch.evaluation.report.content import (
    embedding_map,
    encode,
    galleries,
    heat_map,
    histogram,
)
from megabatch.evaluation.report.page import make_page
from megabatch.evaluation.retrieval import answers_by_ids, answers_by_pairs
from megabatch.evaluation.run import write_report
from megabatch.evaluation.tasks import Matched, glyph_tasks
from tests.evaluation.page import Page

HOSTILE = "<script>alert(1)</script>\"'&$\\frac$"
WAYS = ("image_to_text", "text_to_image")


@pytest.fixture(scope="module")
def matched(small_glyphs: GlyphSet) -> Matched:
    """Features that find the right name for most images and a wrong one for the others."""
    task = glyph_tasks(small_glyphs)[0]
    captions = [task.samples[i].target[0] for i in range(len(task.samples))]
    texts = sorted(set(captions))
    ids = torch.tensor([texts.index(c) for c in captions])
    torch.manual_seed(0)
    text_features = F.normalize(torch.randn(len(texts), 16), dim=1)
    features = F.normalize(text_features[ids] + 0.35 * torch.randn(len(captions), 16), dim=1)
    indices, answers = list(range(len(captions))), answers_by_ids(ids, torch.arange(len(texts)))
    return Matched("a", task.samples, indices, features, texts, text_features, answers)


def image_ids(matched: Matched) -> torch.Tensor:
    """The right text of each image, int64 (n,)."""
    assert set(matched.answers.there.counts.tolist()) == {1}
    return matched.answers.there.pairs()[1]


# Examples.


def all_queries(gallery: dict[str, Any]) -> list[dict[str, Any]]:
    return [*gallery["examples"], *gallery["failures"]]


def test_queries_show_the_five_best_answers_and_the_rank_of_the_right_one(
    matched: Matched,
) -> None:
    there, back = galleries(matched)
    scores = matched.features @ matched.text_features.T
    names = [matched.texts[i] for i in image_ids(matched)]
    for query in all_queries(there):
        # Several images have a name: the query is the one with these cosines.
        cosines = torch.tensor([a["cosine"] for a in query["answers"]])
        best = scores.sort(descending=True)
        (place,) = (best.values[:, :5] - cosines).abs().amax(1).lt(1e-4).nonzero().flatten()
        ranked = best.indices[place].tolist()
        assert [a["text"] for a in query["answers"]] == [matched.texts[i] for i in ranked[:5]]
        assert query["text"] == names[place]
        assert query["rank"] == 1 + ranked.index(int(image_ids(matched)[place]))
        assert query["picture"]
    for query in all_queries(back):
        assert query["picture"] is None
        ranked = scores[:, matched.texts.index(query["text"])].argsort(descending=True).tolist()
        assert [a["text"] for a in query["answers"]] == [names[i] for i in ranked[:5]]
        assert query["rank"] == 1 + [names[i] for i in ranked].index(query["text"])
    for gallery in (there, back):
        assert (len(gallery["examples"]), len(gallery["failures"])) == (8, 4)
        assert all(q["rank"] > 1 for q in gallery["failures"])
        for query in all_queries(gallery):
            answers = query["answers"]
            assert [a["right"] for a in answers] == [a["text"] == query["text"] for a in answers]
            assert [a["rank"] for a in answers] == [1, 2, 3, 4, 5]
            assert all(a["picture"] for a in answers)
            assert (query["missed"] is None) == any(a["right"] for a in answers)
    assert any(q["rank"] == 1 for q in there["examples"])


def test_a_right_answer_beyond_the_first_five_is_shown_at_its_rank(matched: Matched) -> None:
    shifted = replace(matched, text_features=matched.text_features.roll(1, 0))
    for gallery in galleries(shifted):
        missed = [q for q in gallery["examples"] if q["missed"]]
        assert missed
        for query in missed:
            answer = query["missed"]
            assert query["rank"] > 5
            found = answer["rank"], answer["text"], answer["right"]
            assert found == (query["rank"], query["text"], True)
            assert answer["picture"]


def test_of_several_right_texts_the_best_is_ranked_and_each_is_marked(matched: Matched) -> None:
    n = len(matched.texts)
    noise = 0.05 * torch.randn(2 * n, 16)
    two = replace(
        matched,
        texts=[f"{text} {i}" for text in matched.texts for i in (1, 2)],
        text_features=F.normalize(matched.text_features.repeat_interleave(2, 0) + noise, dim=1),
        answers=answers_by_ids(image_ids(matched), torch.arange(n).repeat_interleave(2)),
    )
    rights = []
    for query in galleries(two)[0]["examples"]:
        right = [answer["rank"] for answer in query["answers"] if answer["right"]]
        assert not right or query["rank"] == right[0]
        rights.append(len(right))
    assert max(rights) == 2


class Texts:
    """Pairs of texts, some of them long."""

    first = "text"

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Pair:
        return Pair(f"query {index} {'x' * 20 * index}", f"answer {index}", str(index))


def test_pairs_of_texts_have_no_pictures_and_are_cut_if_long() -> None:
    torch.manual_seed(0)
    features = F.normalize(torch.randn(2, 30, 4), dim=2)
    ids = torch.arange(30)
    matched = Matched(
        *("texts", JoinedTexts(Texts()), ids.tolist(), features[0]),
        *([f"answer {i}" for i in ids.tolist()], features[1], answers_by_pairs(ids, ids, 30, 30)),
    )
    for gallery, asked, found in zip(
        galleries(matched), ("query", "answer"), ("answer", "query"), strict=True
    ):
        assert len(gallery["examples"]) == 8
        for query in gallery["examples"]:
            number = query["text"].split()[1]
            answers = [*query["answers"], query["missed"]]
            right = [a["text"] for a in answers if a is not None and a["right"]]
            assert [text.split()[:2] for text in right] == [[found, number]]
            assert query["text"].startswith(f"{asked} ")
            shown = [query, *query["answers"]]
            assert max(len(one["text"]) for one in shown) <= 400
            assert {one["picture"] for one in shown} == {None}


def test_a_task_s_own_pictures_are_shown_and_only_texts_with_images_are_queries(
    matched: Matched, small_glyphs: GlyphSet
) -> None:
    faces, characters = glyph_tasks(small_glyphs)
    unseen = characters.samples[0].target[0]
    assert faces.picture_of is not None
    assert faces.picture_of(unseen) is None
    assert characters.picture_of is not None
    assert characters.picture_of(unseen) is not None
    more = replace(
        matched,
        texts=[*matched.texts, *(f"without {i}" for i in range(500))],
        text_features=torch.cat([matched.text_features, torch.randn(500, 16)]),
        answers=answers_by_ids(image_ids(matched), torch.arange(len(matched.texts) + 500)),
        picture_of=faces.picture_of,
    )
    there, back = galleries(more)
    assert not any(q["text"].startswith("without") for q in all_queries(back))
    for query in all_queries(there):
        for answer in query["answers"]:
            assert (answer["picture"] is None) == answer["text"].startswith("without")


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "I;16"])
def test_pictures_of_any_mode_become_small(mode: str) -> None:
    picture = encode(Image.new(mode, (300, 150)))
    assert not picture["small"]
    with Image.open(io.BytesIO(base64.b64decode(picture["data"]))) as decoded:
        assert decoded.size == (128, 64)
        assert decoded.format == picture["kind"].upper()


def test_photographs_become_jpegs_drawings_pngs_and_small_pictures_keep_their_pixels() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    photograph = encode(Image.fromarray(noise).resize((800, 600), Image.Resampling.BICUBIC))
    assert photograph["kind"] == "jpeg"
    assert len(photograph["data"]) < 12_000
    assert encode(Image.new("RGB", (300, 300), "white"))["kind"] == "png"
    pixels = np.arange(1024, dtype=np.uint8).reshape(32, 32)
    picture = encode(Image.fromarray(pixels))
    assert picture["small"]
    with Image.open(io.BytesIO(base64.b64decode(picture["data"]))) as decoded:
        assert np.array_equal(np.asarray(decoded), pixels)


# Similarities.


def test_the_histogram_counts_positives_and_negatives(
    matched: Matched, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = histogram(matched)  # of all pairs: there are few
    scores = matched.features @ matched.text_features.T
    right = image_ids(matched)[:, None] == torch.arange(len(matched.texts))
    positives, negatives = scores[right], scores[~right]
    assert sum(got["positives"]) == len(positives)
    assert sum(got["negatives"]) == len(negatives)
    low, high = got["low"], got["high"]
    assert (low, high) == pytest.approx((float(scores.min()), float(scores.max())))
    counts = np.histogram(negatives.numpy(), np.linspace(low, high, 61))[0]
    assert np.abs(counts - got["negatives"]).sum() <= 4  # an edge, rounded
    assert got["mean_positive"] == pytest.approx(float(positives.mean()), abs=1e-6)
    assert got["mean_negative"] == pytest.approx(float(negatives.mean()), abs=1e-6)
    area = roc_auc_score(right.flatten().numpy(), scores.flatten().numpy())
    assert got["separated"] == pytest.approx(area, abs=1e-9)
    monkeypatch.setattr(content, "_SAMPLED", 50)
    got = histogram(matched)
    assert sum(got["positives"]) == 50
    assert 50 * 45 <= sum(got["negatives"]) <= 50 * 50


def test_equal_features_few_images_and_one_text_have_their_content_too(matched: Matched) -> None:
    same = replace(
        matched,
        features=torch.ones_like(matched.features) / 4,
        text_features=torch.ones_like(matched.text_features) / 4,
    )
    assert histogram(same)["separated"] == 0.5
    assert sum(histogram(same)["positives"]) == len(matched.indices)
    assert embedding_map(same) == []
    n = len(matched.indices)
    ids = torch.zeros(n, dtype=torch.int64)
    of_one = {"texts": ["a"], "text_features": matched.text_features[:1]}
    one = replace(matched, **of_one, answers=answers_by_ids(ids, ids[:1]))
    assert sum(histogram(one)["negatives"]) == 0
    assert sum(histogram(one)["positives"]) == n
    assert len(heat_map(one)["texts"]) == 1
    answers = answers_by_ids(image_ids(matched)[:4], torch.arange(len(matched.texts)))
    few = replace(
        matched, indices=matched.indices[:4], features=matched.features[:4], answers=answers
    )
    assert embedding_map(few) == []
    assert len(heat_map(few)["texts"]) == len(set(image_ids(few).tolist()))


def test_the_heat_map_s_diagonal_has_the_positives(matched: Matched) -> None:
    got = heat_map(matched)
    assert len(got["texts"]) == 40
    assert got["texts"] == sorted(set(got["texts"]))
    for i, (text, row) in enumerate(zip(got["texts"], got["cosines"], strict=True)):
        column = matched.texts.index(text)
        images = matched.features[image_ids(matched) == column]
        for j in (i, (i + 1) % 40):
            other = matched.text_features[matched.texts.index(got["texts"][j])]
            assert float((images @ other - row[j]).abs().min()) < 1e-3


def test_the_map_holds_images_and_their_texts(
    matched: Matched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_MAPPED", 30)
    apart = replace(matched, text_features=matched.text_features + 5)  # a modality gap
    points = embedding_map(apart)
    images, texts = ([p for p in points if p["second"] is second] for second in (False, True))
    assert len(images) == 30
    assert {p["text"] for p in texts} == {p["text"] for p in images}
    assert all(0 <= p["x"] <= 1 and 0 <= p["y"] <= 1 for p in points)
    assert all(p["colour"] == int(p["second"]) for p in points)
    places = {p["text"]: np.array([p["x"], p["y"]]) for p in texts}
    own = np.mean([np.linalg.norm(places[p["text"]] - (p["x"], p["y"])) for p in images])
    others = [np.linalg.norm(q - (p["x"], p["y"])) for p in images for q in places.values()]
    assert own < 0.5 * np.mean(others)
    monkeypatch.setattr(content, "_ALL_CLASSES", len(matched.texts))
    monkeypatch.setattr(content, "COLOURS", len(matched.texts))
    points = embedding_map(replace(matched, of_classes=True))
    assert [p["text"] for p in points if p["second"]] == matched.texts
    assert all(matched.texts[p["colour"]] == p["text"] for p in points)


# Charts.


def texts(chart: Markup) -> list[str]:
    """The texts of a chart, whose XML must be sound, and whose colours must be the page's."""
    svg = ElementTree.fromstring(chart)[0]
    assert svg.tag.endswith("svg")
    assert not any(element.tag.endswith("style") for element in svg.iter())
    assert not any(light in chart for light, _ in charts.COLOURS.values())
    return ["".join(e.itertext()) for e in svg.iter() if e.tag.endswith("text")]


def variables(chart: Markup) -> set[str]:
    return set(re.findall(r"var\(--([a-z0-9-]+)\)", chart))


CURVE = np.array([[0.0, 4, 4, 4], [1, 2, 2, 2], [2, 1, 1, 1]])


def test_curves_have_the_colours_of_their_runs_and_ids_of_their_own() -> None:
    assert len({light for light, _ in charts.COLOURS.values()}) == len(charts.COLOURS)
    chart = charts.curves_chart("loss", {0: CURVE, 2: CURVE, 13: CURVE}, "pairs seen")
    assert "pairs seen" in texts(chart)
    assert variables(chart) == {"ink", "line", "c0", "c2", "c3"}
    assert chart.count("stroke-dasharray") == 1  # the 14th run shares the fourth one's colour
    assert 'aria-label="loss, from 4 to 1; ' in chart
    banded = CURVE + np.array([0, 0, -0.1, 0.1])
    for curve in (CURVE[:1], banded):
        assert "c0" in variables(charts.curves_chart("pairs per second", {0: curve}))
    drawn = [charts.curves_chart(title, {0: CURVE}) for title in ("loss", "norm", "loss")]
    references = [set(re.findall(r"[(\"]#([a-z0-9]+)", svg)) for svg in drawn]
    assert references[0]
    assert not references[0] & references[1]
    assert drawn[0] == drawn[2]


def test_bars_have_a_value_and_a_colour_each() -> None:
    values = {"model": [0.5, 0.75], "baseline": [0.2, 0.3], "chance": [0.01, 0.05]}
    chart = charts.bars_chart("<a>", ["@1", "@5"], values)
    assert {"50", "75", "20", "30", "1.0", "5.0", "@1", "@5"} <= set(texts(chart))
    assert {"c0", "c1", "c7"} <= variables(chart)
    assert "c3" not in variables(chart)
    assert 'aria-label="&lt;a&gt;: @1 50.0%, @5 75.0%"' in chart
    assert len(chart) < 20_000


def test_a_histogram_shows_shares_also_of_no_negative() -> None:
    counts = {"low": -0.5, "high": 1.0, "positives": [0, 1, 3], "negatives": [4, 0, 0]}
    counts |= {"mean_positive": 0.75, "mean_negative": -0.25}
    chart = charts.histogram_chart(counts)
    assert {"c0", "c7"} <= variables(chart)
    assert "0.750" in chart
    assert "c7" not in variables(charts.histogram_chart({**counts, "negatives": [0, 0, 0]}))


def test_a_heat_map_is_a_small_image_with_room_for_the_label_of_its_bar() -> None:
    cosines = np.linspace(-0.011, 0.141, 1600).reshape(40, 40).tolist()
    chart = charts.heat_map_chart({"texts": ["a"] * 40, "cosines": cosines})
    assert {"query", "text", "cosine"} <= set(texts(chart))
    assert "data:image/png;base64," in chart
    assert len(chart) < 30_000
    (right,) = re.findall(r'x="([\d.]+)"[^>]*>cosine<', chart)
    (width,) = re.findall(r'viewBox="0 0 (\d+) ', chart)
    assert float(right) < float(width) - 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0003, "0.03"), (0.0149, "1.5"), (0.0995, "10"), (0.756, "76"), (1, "100")],
)
def test_percent_keeps_digits_for_small_values(value: float, text: str) -> None:
    assert charts.percent(value) == text


def test_a_long_curve_is_averaged_within_its_bounds_and_gaps_are_left() -> None:
    records = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": None}, {"step": 3, "loss": 5}]
    assert series(records, "loss").tolist() == [[3, 5, 5, 5]]
    assert len(series(records, "lr")) == len(series(records, "loss", "samples")) == 0
    records = [{"step": i, "loss": float(i % 7)} for i in range(1, 50_001)]
    steps, values, low, high = series(records, "loss").T
    assert len(steps) == 600
    assert np.all(np.diff(steps) > 0)
    assert (low.min(), high.max()) == (0, 6)
    assert np.all((low <= values) & (values <= high))


# Pages.


def figures(recall: float, rank: float) -> dict[str, float]:
    of_way = {f"recall@{k}": recall for k in (1, 5, 10)} | {"median_rank": rank, "queries": 8}
    return {f"{way}/{key}": value for way in WAYS for key, value in of_way.items()}


def write_evaluation(
    folder: Path, *, recall: float = 0.5, title: str = HOSTILE, step: int | None = None
) -> None:
    shared = {"title": title, "note": title, "images": 8, "damage": [title]}
    accuracy = [{"top1": r, "top5": 0.9, "mean_per_class_recall": r} for r in (recall, 0.5)]
    pairs = {"texts": 8, "model": figures(recall, 4 - recall), "chance": figures(0.1, 4)}
    classes = {"classes": 2, "model": accuracy[0], "chance": accuracy[1]}
    evaluation = {
        "run": {"model": title, "parameters": 10, "weights": title, "train_data": title}
        | ({} if step is None else {"step": step}),
        "retrieval": {"pairs": {**shared, **pairs}},
        "zero_shot": {"classes": {**shared, **classes, "recall_by_class": {title: recall}}},
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
def evaluated(tmp_path_factory: pytest.TempPathFactory, matched: Matched) -> Path:
    """A run all of whose names, captions, settings and notes look like HTML."""
    setting = json.dumps(HOSTILE)
    run = write_run(
        tmp_path_factory.mktemp("evaluated") / "<script>alert(1)",
        settings=f"model = {setting}\ntrain_data = {setting}\n"
        "global_batch_size = 4096\nmicro_batch_size = 512\n",
        **{"loss": 6, "lr": 1e-3, "grad_norm": 2, "logit_scale": 14, "pairs_per_second": 9},
    )
    write_evaluation(run)
    hostile = replace(matched, title=HOSTILE, texts=[f"{text} {HOSTILE}" for text in matched.texts])
    most = [{"right": HOSTILE, "taken_for": HOSTILE, "count": 1, "of": 2}]
    classes, counts = [HOSTILE, "b"], [[1, 1], [0, 2]]
    confusion = {"method": HOSTILE, "most": most, "classes": classes, "counts": counts}
    shown = [hostile, replace(hostile, title="classes", of_classes=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "_MAPPED", 10)
        write_report(run, run, shown, {HOSTILE: [confusion]})
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
    links = {source[1:] for source in page.sources if source.startswith("#")}
    assert {"figures", "training", "similarities", "task-1", "task-2", "settings"} <= links
    assert links <= set(page.attributes["id"])
    for text in ("4,096", "512", "final loss", "2.0000", "Similarities", "R@10", "top-5"):
        assert text in page.text
    for text in ("Image → text", "Text → image", "Confusions, ", "taken for", "1 of 2"):
        assert text in page.text
    assert "Without " not in page.text
    for start in ("loss, from 6 to 2", "learning rate,", "gradient norm,", "logit scale (1 / temp"):
        assert any(label.startswith(start) for label in labels(page))
    for part in ("cosines of positives", "queries with", "map of "):
        assert sum(part in label for label in labels(page)) == 2
    light, dark = html.split("prefers-color-scheme: dark", 1)
    for name, (in_light, in_dark) in charts.COLOURS.items():
        assert f"--{name}: {in_light};" in light
        assert f"--{name}: {in_dark};" in dark


def test_values_that_were_not_logged_are_named(tmp_path: Path) -> None:
    _, page = written(write_run(tmp_path / "old", loss=3, lr=1e-3))
    for name in ("gradient norm", "logit scale (1 / temperature)", "pairs per second"):
        assert f"Without {name} in the log: old." in page.text
    assert "Not evaluated yet" in page.text


def test_evaluations_during_the_training_have_curves_for_each_data(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", loss=3)
    values = [(2, None, 0.1), (4, "a.csv", 0.9), (6, "a.csv", 0.8), (6, "b.csv", 0.3)]
    names = [f"pairs/{way}/recall@{k}" for way in WAYS for k in (1, 10)]
    lines = [{"step": s, "val_data": data, **dict.fromkeys(names, v)} for s, data, v in values]
    for some, suffixes in (
        (lines[:1], {"": "0.1 to 0.1"}),
        (lines, {", on the default data": "0.1 to 0.1", ", on a.csv": "0.9 to 0.8",
                 ", on b.csv": "0.3 to 0.3"}),
    ):  # fmt: skip
        (run / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))
        drawn = [label for label in labels(written(run)[1]) if label.startswith("validation")]
        assert sorted(drawn) == sorted(
            f"validation: pairs, {way.replace('_', ' ')}, recall@1{suffix}, from {ends}"
            for way in WAYS
            for suffix, ends in suffixes.items()
        )


def test_figures_of_a_step_before_the_last_one_are_said_to_be(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", loss=3)  # three steps
    for step, told in ((2, "evaluated at step 2, trained to step 3"), (3, ""), (None, "")):
        write_evaluation(run, step=step)
        _, page = written(run)
        assert ("Of earlier weights" in page.text) == bool(told)
        assert told in page.text
        assert ("evaluated step" in page.text) == (step is not None)
        assert "No similarities or examples were kept" in page.text
        assert "50.00%" in page.text


def test_the_page_of_an_evaluation_elsewhere_has_the_run_s_curves(
    evaluated: Path, tmp_path: Path
) -> None:
    run, elsewhere = tmp_path / evaluated.name, tmp_path / "evaluations" / "new"
    shutil.copytree(evaluated, run)
    elsewhere.mkdir(parents=True)
    shutil.move(run / "evaluation.json", elsewhere)
    content.save(elsewhere, run, [], {})  # without tasks, whose charts take seconds
    _, page = written(elsewhere)
    assert evaluated.name in page.text
    assert any(label.startswith("loss, from 6") for label in labels(page))
    shutil.rmtree(run)
    assert "Training" not in written(elsewhere)[1].text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("evaluation", "{", r"evaluation\.json is not .*: evaluate again"),
        ("evaluation", '{"run": {}, "retrieval": 3}', "retrieval is not a table"),
        ("evaluation", "{}", "run is not a table.*: evaluate again"),
        ("report", '{"run": null', r"report\.json is not .*: evaluate again"),
        ("report", '{"run": null, "tasks": []}', "confusions is not a table.*: evaluate again"),
        (
            "report",
            '{"run": null, "tasks": [{}], "confusions": {}}',
            "evaluate again",
        ),
        ("report", '{"run": null, "tasks": 7, "confusions": {}}', "evaluate again"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    run = write_run(tmp_path / "run", loss=3)
    write_evaluation(run)
    (run / f"{name}.json").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        make_page([run])
    assert "\n" not in str(caught.value)


# Several runs.


def rows(html: str) -> list[str]:
    """The text of each table row, cells separated by spaces."""
    found = []
    for row in html.split("<tr")[1:]:
        page = Page("<tr" + row.split("</tr>")[0].replace("><", "> <"))
        found.append(" ".join(page.text.split()))
    return found


def test_curves_figures_and_settings_are_compared(tmp_path: Path) -> None:
    settings = 'model = "m"\noutput = "{}"\nlr = {}\nlock_image = {}\nglobal_batch_size = 64\n'
    logged = {"loss": 6.0, "lr": 1e-3, "grad_norm": 1.0, "logit_scale": 9.0, "pairs_per_second": 5}
    a = write_run(tmp_path / "a", settings=settings.format("a", 0.1, "true"), **logged)
    b = write_run(tmp_path / "b", settings=settings.format("b", 0.2, "false"), **logged)
    write_evaluation(a, recall=0.25, title="held-out", step=2)
    write_evaluation(b, recall=0.75, title="held-out")
    html, page = written(a, b)
    assert page.open == []
    assert "loss, from 6 to 2; from 6 to 2" in labels(page)
    assert len(labels(page)) == 5
    got = rows(html)
    assert "final loss 2.0000 2.0000" in got
    assert "lr 0.1 0.2" in got
    assert "lock_image true false" in got
    differing = got[got.index("lr 0.1 0.2") - 1 :]
    assert not any(row.startswith(("output", "model", "global_batch_size")) for row in differing)
    assert "held-out, image → text: 8 among 8" in got
    assert "R@1 R@5 R@10 median rank" in got
    assert "a (evaluated at step 2, trained to step 3) 25.00% 25.00% 25.00% 3.8" in got
    assert "b 75.00% 75.00% 75.00% 3.2" in got
    best = [part.split("<")[0] for part in html.split('<td class="best">')[1:]]
    # Both directions, then the accuracies, whose top-5 does not differ.
    assert best == [*(["75.00%"] * 3 + ["3.2"]) * 2, "75.00%", "75.00%"]


def test_runs_of_different_batch_sizes_are_compared_by_pairs_seen(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", settings="global_batch_size = 64\n", loss=6)
    b = write_run(tmp_path / "b", settings="global_batch_size = 128\n", loss=5)
    (b / "validation.jsonl").write_text('{"step": 2, "digits/top1": 0.5}\n')
    html, page = written(a, b)
    assert html.count(">pairs seen</text>") == 1  # the loss's
    assert "validation: digits, top1, from 0.5 to 0.5" in labels(page)


def test_missing_logs_values_and_evaluations_are_named(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", loss=6, lr=1)
    b = write_run(tmp_path / "b", loss=5)
    c = write_run(tmp_path / "c", loss=5)
    (c / "metrics.jsonl").unlink()
    write_evaluation(c)
    _, page = written(a, b, c)
    assert "Without learning rate in the log: b." in page.text
    assert "Without gradient norm in the log: a, b." in page.text
    assert "Without a log of training (metrics.jsonl): c." in page.text
    assert "a: Not evaluated yet" in page.text
    assert "None, apart from the output folder." in page.text


def test_runs_of_one_name_are_told_apart_and_names_are_escaped(tmp_path: Path) -> None:
    name = "<script>alert(1)"
    folders = [tmp_path / part / name for part in ("x", "y")] + [tmp_path / "$\\frac"]
    for folder in folders:
        write_run(folder, settings=f'train_data = "<script>{folder.parent.name}"\n', loss=1)
        write_evaluation(folder)
    html, page = written(*folders)
    assert "<script" not in html
    for text in (f"x/{name}", f"y/{name}", "$\\frac", "<script>x", HOSTILE):
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
        ([], "RUN: needed, but not given"),
        (["a", "b"], "--output: needed to compare several runs"),
        (["missing"], "missing is not a folder"),
        (["empty"], "empty is not a run: it has neither config.toml nor evaluation.json"),
        (["a", "--output", "empty"], "--output empty: is a folder"),
        (["a", "--output", "a/config.toml/x.html"], "a/config.toml/x.html cannot be written: "),
        (["a", "empty", "--output", "x.html"], "empty is not a run"),
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
