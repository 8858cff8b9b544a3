from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from megabatch.data.images import decoded
from megabatch.data.pairs import BadSample
from megabatch.data.sources import open_pairs
from megabatch.data.tables import Wanted, open_tables
from megabatch.errors import UsageError

from .samples import png

CAPTIONS = ["plain", 'with "quotes", commas', "two\nlines", "tab\there", "caf\u00e9"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for i in range(5):
        (tmp_path / "images" / f"{i}.png").write_bytes(png(i))
    return tmp_path


def write_text(path: Path, header: list[str], rows: list[list[str]], delimiter: str) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path


def rows() -> list[list[str]]:
    return [[str(i), f"images/{i}.png", caption] for i, caption in enumerate(CAPTIONS)]


def check(pairs: Any) -> None:
    assert len(pairs) == 5
    assert [pairs[i].caption for i in range(5)] == CAPTIONS
    assert [decoded(pairs[i].image).getpixel((0, 0))[0] for i in range(5)] == list(range(5))


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
@pytest.mark.parametrize("columns", [("filepath", "title"), ("image", "caption")])
def test_text_tables(folder: Path, name: str, delimiter: str, columns: tuple[str, str]):
    path = write_text(folder / name, ["id", *columns], rows(), delimiter)
    pairs = open_tables([path], Wanted())
    check(pairs)
    assert pairs[3].key == f"{name}:row 4"
    check(pickle.loads(pickle.dumps(pairs)))


def test_named_columns_and_separator(folder: Path):
    path = write_text(folder / "a.csv", ["title", "picture", "words"], rows(), ";")
    check(open_tables([path], Wanted(image="picture", caption="words", separator=";")))


NEGATIVES = [("far", "farther"), ("other",), ()]


def write_negatives(folder: Path, kind: str) -> Path:
    """A table of two texts and their negatives, in one column or in two."""
    path = folder / f"a.{kind}"
    columns = {"query": ["a", "b", "c"], "positive": ["x", "y", "z"]}
    if kind == "jsonl":
        rows = [
            {"query": q, "positive": p, "negative": n[0] if len(n) == 1 else list(n)}
            for q, p, n in zip(*columns.values(), NEGATIVES, strict=True)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        table = pa.table({**columns, "negatives": [[*n, None, " "] for n in NEGATIVES]})
        pa.parquet.write_table(table, path)
    elif kind == "arrow":
        table = pa.table({**columns, "negatives": [list(n) for n in NEGATIVES]})
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        padded = [[*n, "", ""][:2] for n in NEGATIVES]
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        write_text(
            path,
            ["query", "negative_1", "positive", "negative_2"],
            [[q, n[0], p, n[1]] for (q, p), n in zip(rows, padded, strict=True)],
            ",",
        )
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "arrow"])
def test_negatives(tmp_path: Path, kind: str):
    path = write_negatives(tmp_path, kind)
    pairs = open_tables([path], Wanted(negatives=True))
    assert [(pairs[i].image, pairs[i].caption) for i in range(3)] == [
        *zip("abc", "xyz", strict=True)
    ]
    assert [pairs[i].negatives for i in range(3)] == NEGATIVES
    assert pairs.notes == []
    unused = open_tables([path], Wanted())
    assert unused[0].negatives == ()
    [note] = unused.notes
    assert note.startswith(f"{path} has negatives ('negative")
    assert note.endswith("--loss infonce --hard-negatives N")


def test_named_columns_of_negatives(tmp_path: Path):
    path = write_negatives(tmp_path, "csv")
    pairs = open_tables([path], Wanted(negatives=True, negative="negative_2, positive"))
    assert [pairs[i].negatives for i in range(3)] == [("farther", "x"), ("y",), ("z",)]
    with pytest.raises(UsageError, match=r"no negative column 'hard'; its .*--csv-negative-key"):
        open_tables([path], Wanted(negatives=True, negative="hard"))
    path.write_text("query,positive\na,b\n")
    with pytest.raises(UsageError, match="no negative column 'negative'"):
        open_tables([path], Wanted(negatives=True))
    pa.parquet.write_table(
        pa.table({"query": ["q"], "text": ["p"], "negative": [1]}), tmp_path / "b.parquet"
    )
    with pytest.raises(UsageError, match="negative is not text"):
        open_pairs(str(tmp_path / "b.parquet"), negatives=True)


def test_an_image_may_have_negatives(folder: Path):
    header = ["filepath", "title", "negative"]
    rows = [[f"images/{i}.png", "right", f"wrong {i}"] for i in range(2)]
    pairs = open_tables([write_text(folder / "a.csv", header, rows, ",")], Wanted(negatives=True))
    assert pairs[1].negatives == ("wrong 1",)
    assert decoded(pairs[1].image).getpixel((0, 0))[0] == 1


@pytest.mark.parametrize("kind", ["path", "bytes", "struct", "struct with paths"])
def test_parquet(folder: Path, kind: str):
    files = [f"images/{i}.png" for i in range(5)]
    images = {
        "path": files,
        "bytes": [png(i) for i in range(5)],
        "struct": [{"bytes": png(i), "path": None} for i in range(5)],
        "struct with paths": [{"bytes": None, "path": name} for name in files],
    }[kind]
    path = folder / "a.parquet"
    pa.parquet.write_table(pa.table({"image": images, "text": CAPTIONS}), path, row_group_size=2)
    check(open_tables([path], Wanted()))


def test_bad_samples_keep_their_place(folder: Path):
    (folder / "broken.png").write_bytes(b"no picture")
    broken = [
        ["images/0.png", ""],
        ["images/9.png", "gone"],
        ["broken.png", "broken"],
        ["", "no path"],
        ["images", "a folder"],
        ["images/1.png", "good"],
    ]
    pairs = open_tables(
        [write_text(folder / "a.csv", ["filepath", "title"], broken, ",")], Wanted()
    )
    reasons = []
    for i in range(5):
        with pytest.raises(BadSample) as caught:
            decoded(pairs[i].image)
        reasons.append(caught.value.reason)
    missing = "missing image file"
    assert reasons == [
        "empty caption",
        missing,
        "undecodable image",
        "no image",
        "unreadable image file",
    ]
    assert pairs[5].caption == "good"


def test_nulls_in_parquet(folder: Path):
    table = pa.table({"image": ["images/0.png", None, "images/1.png"], "text": [None, "a", "b"]})
    pa.parquet.write_table(table, folder / "a.parquet")
    pairs = open_tables([folder / "a.parquet"], Wanted())
    with pytest.raises(BadSample, match="empty caption"):
        pairs[0]
    with pytest.raises(BadSample, match="no image"):
        pairs[1]
    assert pairs[2].caption == "b"


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_missing_columns_are_named_with_those_there(folder: Path, name: str):
    path = folder / name
    if name == "a.csv":
        path.write_text("url,alt\nhttp://x,a\n")
    else:
        pa.parquet.write_table(pa.table({"url": ["x"], "alt": ["y"]}), path)
    expected = r"no image column 'filepath' or .* are 'url', 'alt' \(--csv-img-key names it, or"
    with pytest.raises(UsageError, match=expected):
        open_tables([path], Wanted())
    with pytest.raises(UsageError, match=r"no caption column 'words'; its .* 'url', 'alt'"):
        open_tables([path], Wanted(image="url", caption="words"))


QUERIES = ["what is a", " what is b ", "c?"]
PASSAGES = ["it is a", "it is b", "c"]


def write_texts(path: Path, query: str, passage: str) -> Path:
    rows = [
        {query: q, passage: p, "image": "x.png"} for q, p in zip(QUERIES, PASSAGES, strict=True)
    ]
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        write_text(path, [query, passage, "image"], [list(row.values()) for row in rows], ",")
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl"])
def test_pairs_of_texts(tmp_path: Path, name: str):
    path = write_texts(tmp_path / name, "q", "p")
    pairs = open_tables([path], Wanted(query="q", caption="p"))
    assert pairs.first == "text"
    assert [(pair.image, pair.caption) for pair in pairs] == [
        (query.strip(), passage) for query, passage in zip(QUERIES, PASSAGES, strict=True)
    ]
    itself = open_tables([path], Wanted(query="q", caption="q"))  # SimCSE's pairs
    assert (itself[0].image, itself[0].caption) == ("what is a", "what is a")


@pytest.mark.parametrize(
    ("query", "passage"),
    [("query", "positive"), ("anchor", "positive"), ("question", "answer"), ("sentence1", "text")],
)
def test_usual_names_of_pairs_of_texts(tmp_path: Path, query: str, passage: str):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"negative": "n", query: "q", passage: "p"}))
    (pair,) = open_tables([path], Wanted())
    assert (pair.image, pair.caption) == ("q", "p")


def test_images_come_before_queries_that_are_not_asked_for(folder: Path):
    path = write_text(
        folder / "a.csv", ["image", "query", "text"], [["images/3.png", "q", "t"]], ","
    )
    assert open_tables([path], Wanted()).first == "image"
    assert open_tables([path], Wanted(query="query"))[0].image == "q"
    with pytest.raises(UsageError, match="image column 'image' and query column 'query'"):
        open_tables([path], Wanted(query="query", image="image"))
    other = write_text(folder / "b.csv", ["query", "text"], [["q", "t"]], ",")
    with pytest.raises(UsageError, match=r"a\.csv has images with texts, but .*b\.csv texts"):
        open_tables([path, other], Wanted())


def test_bad_texts(tmp_path: Path):
    table = pa.table({"query": ["", None, "q", "q"], "answer": ["a", "a", " ", "a"]})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    pairs = open_tables([tmp_path / "a.parquet"], Wanted())
    for index, reason in enumerate(["empty query", "empty query", "empty caption"]):
        with pytest.raises(BadSample, match=reason):
            pairs[index]
    assert pairs[3].caption == "a"


def test_a_query_column_that_is_not_there(tmp_path: Path):
    path = write_texts(tmp_path / "a.csv", "q", "p")
    with pytest.raises(
        UsageError, match=r"a\.csv has no query column 'Q'; its .* 'q', 'p', 'image'"
    ):
        open_tables([path], Wanted(query="Q"))
    path = write_texts(tmp_path / "a.jsonl", "query", "p")
    with pytest.raises(UsageError, match=r"no caption column 'positive' or 'answer' or .* 'title'"):
        open_tables([path], Wanted(query="query"))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"image": [1], "text": ["a"]}, "no image: a.parquet:row 1"),
        ({"query": ["a"], "text": [["a", "b"]]}, "caption is not text"),
        ({"query": ["a"], "text": [7]}, "caption is not text"),
        ({"query": [b"a"], "text": ["a"]}, "query is not text"),
    ],
)
def test_columns_of_another_kind(tmp_path: Path, columns: dict[str, Any], expected: str):
    pa.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=f"none of 1 sample tried can be used; .*{expected}"):
        open_pairs(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("name", "between", "separator"),
    [
        ("a.csv", ";", ";"),
        ("a.csv", "\t", "\\t"),
        ("a.csv", "\t", None),
        ("a.tsv", ",", None),
    ],
)
def test_separators(folder: Path, name: str, between: str, separator: str | None):
    (folder / name).write_text(f"filepath{between}title\nimages/0.png{between}a b\n")
    assert open_pairs(str(folder / name), separator=separator)[0].caption == "a b"
    with pytest.raises(UsageError, match=r"has no image column .*; its columns are 'filepath.*tit"):
        open_pairs(str(folder / name), separator="|")
    with pytest.raises(UsageError, match="--csv-separator '::': expected one character"):
        open_pairs(str(folder / name), separator="::")


def save(folder: Path, columns: dict[str, Any], *, shards: int = 1, rows_at_once: int = 2) -> Path:
    """Write a folder like `save_to_disk`: Arrow streams of record batches, and their list."""
    folder.mkdir(parents=True)
    table = pa.table(columns)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    per_shard = -(-len(table) // shards)
    for number, name in enumerate(names):
        part = table.slice(number * per_shard, per_shard)
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(part, max_chunksize=rows_at_once)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_that_datasets_saved(tmp_path: Path, shards: int):
    images = [{"bytes": png(i), "path": None} for i in range(5)]
    folder = save(tmp_path / "set", {"image": images, "text": CAPTIONS}, shards=shards)
    (folder / "cache-0123.arrow").write_bytes(b"a result of map")
    pairs = open_pairs(str(folder))
    check(pairs)
    assert pairs[0].key == f"data-00000-of-{shards:05d}.arrow:row 1"
    assert len(pickle.dumps(pairs)) < 2_000 * shards  # what a worker is sent: the file is mapped
    check(pickle.loads(pickle.dumps(pairs)))
    check(open_pairs(f"{folder}/data-*.arrow"))
    next(folder.glob("data-00000-of-*")).unlink()
    if shards > 1:
        with pytest.raises(UsageError, match="has 2 of the 3 files saved"):
            open_pairs(str(folder))


def test_what_datasets_itself_writes(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = {
        "picture": [Image.new("RGB", (4, 3), (i, 0, 0)) for i in range(5)],
        "label": [0, 1, 0, 1, 0],
        "words": CAPTIONS,
    }
    features = datasets.Features(
        picture=datasets.Image(),
        label=datasets.ClassLabel(names=["a", "b"]),
        words=datasets.Value("string"),
    )
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(tmp_path / "one", num_shards=2)
    columns = {"image_column": "picture", "caption_column": "words"}
    check(open_pairs(str(tmp_path / "one"), **columns))
    selected = made.select([4, 3, 0]).sort("words")  # an order that is not the file's
    datasets.DatasetDict(train=selected, test=made).save_to_disk(tmp_path / "splits")
    train = open_pairs(str(tmp_path / "splits" / "train"), **columns)
    assert [train[i].caption for i in range(3)] == sorted(CAPTIONS[i] for i in (4, 3, 0))
    check(open_pairs(str(tmp_path / "splits" / "test"), **columns))
    with pytest.raises(UsageError, match=r"caption is not text"):
        open_pairs(str(tmp_path / "one"), image_column="picture", caption_column="label")
