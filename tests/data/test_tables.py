"""Columns of tables, of images or texts, in files of all kinds."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megabatch.data.images import decoded
from megabatch.data.sources import open_pairs
from megabatch.data.tables import Wanted, open_tables
from megabatch.errors import UsageError

from .samples import captions, png, write_table

CAPTIONS = ["plain", 'with "quotes", commas', "two\nlines", "tab\there", "caf\u00e9"]
FILES = [f"images/{i}.png" for i in range(5)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for i, name in enumerate(FILES):
        (tmp_path / name).write_bytes(png(i))
    return tmp_path


def check(pairs: Any) -> None:
    assert captions(pairs) == CAPTIONS
    assert [decoded(pairs[i].image).getpixel((0, 0))[0] for i in range(5)] == list(range(5))


IMAGES = {
    "a.csv": {"filepath": FILES, "title": CAPTIONS},
    "a.tsv": {"id": FILES, "image": FILES, "caption": CAPTIONS},
    "a.jsonl": {"image_path": FILES, "text": CAPTIONS},
    "a.parquet": {"file_name": FILES, "text": CAPTIONS},
    "bytes.parquet": {"image": [png(i) for i in range(5)], "text": CAPTIONS},
    "a.arrow": {"image": [{"bytes": png(i), "path": None} for i in range(5)], "text": CAPTIONS},
    "paths.arrow": {"image": [{"bytes": None, "path": name} for name in FILES], "text": CAPTIONS},
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
def test_images(folder: Path, name: str):
    path = write_table(folder / name, IMAGES[name])
    pairs = open_tables([path], Wanted())
    check(pairs)
    assert pairs[3].key == f"{name}:row 4"
    check(pickle.loads(pickle.dumps(pairs)))


@pytest.mark.parametrize(
    ("name", "query", "passage"),
    [
        ("a.csv", "q", "p"),
        ("a.jsonl", "query", "text"),
        ("a.parquet", "anchor", "positive"),
        ("a.arrow", "question", "answer"),
        ("a.tsv", "sentence1", "sentence2"),
    ],
)
def test_pairs_of_texts(tmp_path: Path, name: str, query: str, passage: str):
    columns = {query: [" what is 0 ", "b"], "negative": ["n", "n"], passage: ["it is 0", "c"]}
    path = write_table(tmp_path / name, columns)
    named = Wanted(query=query, caption=passage)
    pairs = open_tables([path], named if query == "q" else Wanted())
    assert pairs.first == "text"
    assert [(pair.image, pair.caption) for pair in pairs] == [("what is 0", "it is 0"), ("b", "c")]
    (same, _) = open_tables([path], Wanted(query=query, caption=query))  # SimCSE's pairs
    assert (same.image, same.caption) == ("what is 0", "what is 0")


def test_images_come_before_queries_that_are_not_asked_for(folder: Path):
    path = write_table(folder / "a.csv", {"image": FILES[:1], "query": ["q"], "text": ["t"]})
    assert open_tables([path], Wanted()).first == "image"
    assert open_tables([path], Wanted(query="query"))[0].image == "q"
    with pytest.raises(UsageError, match="image column 'image' and query column 'query'"):
        open_tables([path], Wanted(query="query", image="image"))
    other = write_table(folder / "b.csv", {"query": ["q"], "text": ["t"]})
    with pytest.raises(UsageError, match=r"a\.csv has images with texts, but .*b\.csv texts"):
        open_tables([path, other], Wanted())


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(), r"no image column 'filepath' or .* are 'url', 'alt' \(--csv-img-key, --csv-q"),
        (Wanted(image="url"), "no caption column 'title' or 'caption' or 'text'; its"),
        (Wanted(image="url", caption="words"), "no caption column 'words'; its .* 'url', 'alt'"),
        (Wanted(query="Q"), "no query column 'Q'; its columns are"),
        (Wanted(query="url"), "no caption column 'positive' or 'answer' or .* 'title'"),
        (Wanted(query="url", caption="alt", negatives=True), "no negative column 'negative'; its"),
        (Wanted(query="url", caption="alt", negatives=True, negative="x"), "no negative column 'x"),
    ],
)  # fmt: skip
def test_missing_columns_are_named_with_those_there(tmp_path: Path, wanted: Wanted, expected: str):
    path = write_table(tmp_path / "a.parquet", {"url": ["x"], "alt": ["y"]})
    with pytest.raises(UsageError, match=expected):
        open_tables([path], wanted)


NEGATIVES = [("far", "farther"), ("other",), ()]
LISTS = [[*texts, None, " "] for texts in NEGATIVES]
COLUMNS = {
    "a.csv": {"negative_1": ["far", "other", ""], "negative_2": ["farther", "", ""]},
    "a.jsonl": {"negatives": [LISTS[0], "other", LISTS[2]]},  # a list, or one text alone
    "a.parquet": {"negatives": LISTS},
    "a.arrow": {"negative": LISTS},
}


@pytest.mark.parametrize("name", COLUMNS)
def test_negatives(tmp_path: Path, name: str):
    columns = {"query": [*"abc"], "positive": [*"xyz"], **COLUMNS[name]}
    path = write_table(tmp_path / name, columns)
    pairs = open_tables([path], Wanted(negatives=True))
    assert [(pair.image, pair.caption, pair.negatives) for pair in pairs] == [
        *zip("abc", "xyz", NEGATIVES, strict=True)
    ]
    assert open_tables([path], Wanted())[0].negatives == ()
    if name == "a.csv":
        named = open_tables([path], Wanted(negatives=True, negative="negative_2, positive"))
        assert [pair.negatives for pair in named] == [("farther", "x"), ("y",), ("z",)]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_bad_samples_keep_their_place(folder: Path, name: str):
    (folder / "broken.png").write_bytes(b"no picture")
    rows = [
        ("empty caption", FILES[0], None),
        ("missing or unreadable image file", "images/9.png", "gone"),
        ("missing or unreadable image file", "images", "a folder"),
        ("undecodable image", "broken.png", "broken"),
        ("no image", None, "no path"),
    ]
    reasons, images, texts = zip(*rows, strict=True)
    columns = {"image": [*images, FILES[1]], "text": [*texts, "good"]}
    pairs = open_tables([write_table(folder / name, columns)], Wanted())
    assert captions(pairs) == [*(f"({reason})" for reason in reasons), "good"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"image": [1], "text": ["a"]}, "no image: a.parquet:row 1"),
        ({"query": ["a"], "text": [["a", "b"]]}, "caption is not text"),
        ({"query": ["a"], "text": [7]}, "caption is not text"),
        ({"query": ["a"], "text": [" "]}, "empty caption"),
        ({"query": [b"a"], "text": ["a"]}, "query is not text"),
        ({"query": [""], "text": ["a"]}, "empty query"),
        ({"query": ["q"], "text": ["p"], "negative": [1]}, "negative is not text"),
    ],
)
def test_columns_of_another_kind(tmp_path: Path, columns: dict[str, Any], expected: str):
    path = write_table(tmp_path / "a.parquet", columns)
    with pytest.raises(UsageError, match=f"none of 1 sample tried can be used; .*{expected}"):
        open_pairs(str(path), negatives="negative" in columns)


@pytest.mark.parametrize(
    ("name", "between", "separator"),
    [("a.csv", ";", ";"), ("a.csv", "\t", "\\t"), ("a.csv", "\t", None), ("a.tsv", ",", None)],
)
def test_separators(folder: Path, name: str, between: str, separator: str | None):
    (folder / name).write_text(f"filepath{between}title\nimages/0.png{between}a b\n")
    assert open_pairs(str(folder / name), separator=separator)[0].caption == "a b"
    with pytest.raises(UsageError, match=r"has no image column .*; its columns are 'filepath.*tit"):
        open_pairs(str(folder / name), separator="|")
    with pytest.raises(UsageError, match="--csv-separator '::': expected one character"):
        open_pairs(str(folder / name), separator="::")


def test_folders_that_datasets_saved(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    pictures = [Image.new("RGB", (4, 3), (i, 0, 0)) for i in range(5)]
    rows = {"picture": pictures, "label": [0, 1, 0, 1, 0], "words": CAPTIONS}
    features = datasets.Features(
        picture=datasets.Image(),
        label=datasets.ClassLabel(names=["a", "b"]),
        words=datasets.Value("string"),
    )
    made, folder = datasets.Dataset.from_dict(rows, features=features), tmp_path / "one"
    made.save_to_disk(folder, num_shards=2)
    (folder / "cache-0123.arrow").write_bytes(b"a result of map")
    columns = {"image_column": "picture", "caption_column": "words"}
    pairs = open_pairs(str(folder), **columns)
    check(pairs)
    assert pairs[0].key == "data-00000-of-00002.arrow:row 1"
    assert len(pickle.dumps(pairs)) < 2_000  # what a worker is sent: the files are mapped
    selected = made.select([4, 3, 0]).sort("words")  # an order that is not the file's
    datasets.DatasetDict(train=selected, test=made).save_to_disk(tmp_path / "splits")
    train = open_pairs(str(tmp_path / "splits" / "train"), **columns)
    assert captions(train) == sorted(CAPTIONS[i] for i in (4, 3, 0))
    with pytest.raises(UsageError, match=r"caption is not text"):
        open_pairs(str(folder), image_column="picture", caption_column="label")
    next(folder.glob("data-00000-of-*")).unlink()
    with pytest.raises(UsageError, match="has 1 of the 2 files saved"):
        open_pairs(str(folder), **columns)
