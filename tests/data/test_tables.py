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


NEGATIVES = [("far", "farther"), ("other",), ()]


def write_negatives(folder: Path, kind: str) -> Path:
    """A table of two texts and their negatives, in one column of lists or in two."""
    path = folder / f"a.{kind}"
    lists: list[Any] = [[*n, None, " "] for n in NEGATIVES]
    lists[1] = "other" if kind == "jsonl" else lists[1]  # one text alone
    columns = {"query": [*"abc"], "positive": [*"xyz"], "negatives": lists}
    table = None if kind == "jsonl" else pa.table(columns)
    if kind == "jsonl":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pa.parquet.write_table(table, path)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text(
            "query,negative_1,positive,negative_2\na,far,x,farther\nb,other,y,\nc,,z,\n"
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


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_bad_samples_keep_their_place(folder: Path, name: str):
    (folder / "broken.png").write_bytes(b"no picture")
    rows = {
        "empty caption": ("images/0.png", None),
        "missing image file": ("images/9.png", "gone"),
        "undecodable image": ("broken.png", "broken"),
        "no image": (None, "no path"),
        "unreadable image file": ("images", "a folder"),
    }
    columns = [*zip(*rows.values(), ("images/1.png", "good"), strict=True)]
    if name == "a.parquet":
        pa.parquet.write_table(pa.table([*map(list, columns)], ["image", "text"]), folder / name)
    else:
        write_text(folder / name, ["image", "text"], [*zip(*columns, strict=True)], ",")
    pairs = open_tables([folder / name], Wanted())
    for index, reason in enumerate(rows):
        with pytest.raises(BadSample, match=reason):
            decoded(pairs[index].image)
    assert pairs[5].caption == "good"


def test_missing_columns_are_named_with_those_there(folder: Path):
    path = folder / "a.parquet"
    pa.parquet.write_table(pa.table({"url": ["x"], "alt": ["y"]}), path)
    expected = r"no image column 'filepath' or .* are 'url', 'alt' \(--csv-img-key names it, or"
    with pytest.raises(UsageError, match=expected):
        open_tables([path], Wanted())
    with pytest.raises(UsageError, match=r"no caption column 'words'; its .* 'url', 'alt'"):
        open_tables([path], Wanted(image="url", caption="words"))


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl"])
def test_pairs_of_texts(tmp_path: Path, name: str):
    path = tmp_path / name
    rows = [{"q": f" what is {i} ", "p": f"it is {i}", "image": "x.png"} for i in range(3)]
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        write_text(path, [*rows[0]], [list(row.values()) for row in rows], ",")
    pairs = open_tables([path], Wanted(query="q", caption="p"))
    assert pairs.first == "text"
    assert [(pair.image, pair.caption) for pair in pairs] == [
        (f"what is {i}", f"it is {i}") for i in range(3)
    ]
    itself = open_tables([path], Wanted(query="q", caption="q"))  # SimCSE's pairs
    assert (itself[0].image, itself[0].caption) == ("what is 0", "what is 0")
    there = r"; its columns are 'q', 'p', 'image'"
    with pytest.raises(UsageError, match=rf"no query column 'Q'{there} \(--csv-query-key names it"):
        open_tables([path], Wanted(query="Q"))
    with pytest.raises(UsageError, match=r"no caption column 'positive' or 'answer' or .* 'title'"):
        open_tables([path], Wanted(query="q"))


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
