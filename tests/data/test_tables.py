from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from megabatch.data.pairs import BadSample, decoded
from megabatch.data.tables import TablePairs, Wanted, open_tables
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


def check(pairs: TablePairs) -> None:
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


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_negatives_that_are_not_used_are_told(tmp_path: Path, kind: str):
    path = write_negatives(tmp_path, kind)
    names = "'negative'" if kind == "jsonl" else "'negative_1', 'negative_2'"
    unused = open_tables([path], Wanted())
    assert unused[0].negatives == ()
    [note] = unused.notes
    assert note.startswith(f"{path} has negatives ({names}), which are not used: ")
    assert note.endswith("--loss infonce --hard-negatives N")
    found = open_tables([path], Wanted(negatives=None))
    assert found.notes == [note]
    assert [found[i].negatives for i in range(3)] == NEGATIVES


def test_negatives_if_there_are_any(tmp_path: Path):
    columns = {"query": ["q"], "positive": ["p"]}
    path = tmp_path / "a.parquet"
    for other in ({}, {"negative": [1]}):  # a column of something else is none
        pa.parquet.write_table(pa.table({**columns, **other}), path)
        assert open_tables([path], Wanted(negatives=None))[0].negatives == ()


def test_named_columns_of_negatives(tmp_path: Path):
    path = write_negatives(tmp_path, "csv")
    pairs = open_tables([path], Wanted(negatives=True, negative="negative_2, positive"))
    assert [pairs[i].negatives for i in range(3)] == [("farther", "x"), ("y",), ("z",)]
    with pytest.raises(
        UsageError, match=r"no column of negatives 'hard'; its .*--csv-negative-key"
    ):
        open_tables([path], Wanted(negatives=True, negative="hard"))
    path.write_text("query,positive\na,b\n")
    with pytest.raises(UsageError, match="no column of negatives 'negative'"):
        open_tables([path], Wanted(negatives=True))


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


def test_a_row_that_is_not_utf8_costs_no_other(folder: Path):
    path = folder / "a.csv"
    path.write_bytes(b"filepath,title\nimages/0.png,\xff\xfe\nimages/1.png,good\n")
    pairs = open_tables([path], Wanted())
    assert pairs[1].caption == "good"
    with pytest.raises(BadSample, match=r"not UTF-8: a\.csv:row 1"):
        pairs[0]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_missing_columns_are_named_with_those_there(folder: Path, name: str):
    path = folder / name
    if name == "a.csv":
        path.write_text("url,alt\nhttp://x,a\n")
    else:
        pa.parquet.write_table(pa.table({"url": ["x"], "alt": ["y"]}), path)
    expected = r"no image column 'filepath' or .* no query .* are 'url', 'alt'"
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


def test_json_lines_with_images(folder: Path):
    lines = [
        json.dumps({"file_name": f"images/{i}.png", "text": t}) for i, t in enumerate(CAPTIONS)
    ]
    (folder / "a.jsonl").write_text("\n".join([*lines, "no json"]))
    pairs = open_tables([folder / "a.jsonl"], Wanted())
    check(pairs)
    assert pairs.damage[0].endswith("1 line left out, the first is line 6: no JSON object")
