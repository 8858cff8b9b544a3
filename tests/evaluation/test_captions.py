from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from megabatch.data.pairs import BadSample
from megabatch.errors import UsageError
from megabatch.evaluation.captions import open_captioned, open_val_data, reading_of
from megabatch.evaluation.samples import Samples
from tests.data.test_tables import save
from tests.evaluation.material import (
    caption_table,
    captions,
    coco,
    picture,
    png,
    shard,
    write_pictures,
)

N = 7


def check(data: Samples[list[str]]) -> None:
    """The images of `material` with all their captions, in order."""
    assert len(data) == N
    for i, expected in enumerate(captions(N)):
        assert data[i].target == expected
        assert data[i].image.tobytes() == picture(i % 4, i).tobytes()


def test_rows_of_one_image_are_joined(tmp_path: Path) -> None:
    table = caption_table(tmp_path, N)
    check(open_captioned(str(table)))
    moved = tmp_path / "elsewhere" / "pairs.tsv"
    moved.parent.mkdir()
    rows = [line.split(",", 1) for line in table.read_text().splitlines()]
    moved.write_text("".join(f"{image}\t{caption}\n" for image, caption in rows))
    check(open_captioned(str(moved), image_folder=tmp_path))


def test_a_list_column_and_image_bytes(tmp_path: Path) -> None:
    images = [png(picture(i % 4, i)) for i in range(N)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"image": images, "caption": captions(N)}), path)
    check(open_captioned(str(path)))
    structs = [{"bytes": image, "path": None} for image in images]
    pyarrow.parquet.write_table(pa.table({"photo": structs, "said": captions(N)}), path)
    check(open_captioned(str(path), image_column="photo", caption_column="said"))


def rows_of(folder: Path) -> list[dict[str, str]]:
    """A row for each caption, an image's rows apart from each other."""
    names, texts = write_pictures(folder, N), captions(N)
    return [
        {"photo": names[i], "said": texts[i][j]}
        for j in range(3)
        for i in range(N)
        if j < len(texts[i])
    ]


COLUMNS = {"image_column": "photo", "caption_column": "said"}


def test_json_lines_of_named_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(tmp_path / "images")))
    check(open_captioned(str(path), image_folder=tmp_path / "images", **COLUMNS))
    with pytest.raises(UsageError, match=r"no image column 'filepath' .* are 'photo', 'said'"):
        open_captioned(str(path))
    lists = [{"photo": f"images/{i}.png", "said": texts} for i, texts in enumerate(captions(N))]
    path.write_text("".join(json.dumps(row) + "\n" for row in lists))
    check(open_captioned(str(path), **COLUMNS))


def test_a_folder_of_datasets_with_named_columns(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    names = write_pictures(folder, N)
    save(folder / "paths", pa.Table.from_pylist(rows_of(tmp_path / "images")).to_pydict())
    check(open_captioned(str(folder / "paths"), image_folder=tmp_path / "images", **COLUMNS))
    images: list[Any] = [{"bytes": (folder / n).read_bytes(), "path": None} for n in names[:-1]]
    images.append({"bytes": None, "path": f"../{names[-1]}"})
    save(folder / "train", {"photo": images, "said": captions(N)}, shards=2)
    data = open_captioned(str(folder / "train"), **COLUMNS)
    check(data)
    assert len(pickle.dumps(data)) < 5_000  # what a worker is sent: images stay in the file
    check(pickle.loads(pickle.dumps(data)))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_rows_of_one_image_are_joined_across_the_files_of_a_source(
    tmp_path: Path, kind: str
) -> None:
    names_and_texts = rows_of(tmp_path / "images")
    names = [row["photo"] for row in names_and_texts]
    images = [{"bytes": (tmp_path / "images" / name).read_bytes(), "path": None} for name in names]
    texts = [row["said"] for row in names_and_texts]
    if kind == "arrow":
        check(
            open_captioned(str(save(tmp_path / "set", {"image": images, "text": texts}, shards=2)))
        )
        return
    for part, rows in enumerate((slice(0, N), slice(N, None))):
        path = tmp_path / "images" / f"{part}.{kind}"
        if kind == "jsonl":
            pairs = zip(names[rows], texts[rows], strict=True)
            lines = [json.dumps({"image": name, "text": text}) + "\n" for name, text in pairs]
            path.write_text("".join(lines))
        else:
            table = pa.table({"image": images[rows], "text": texts[rows]})
            pyarrow.parquet.write_table(table, path)
    check(open_captioned(str(tmp_path / f"images/*.{kind}")))


def test_the_same_name_in_another_folder_is_another_image(tmp_path: Path) -> None:
    for name, kind in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        picture(kind, kind).save(tmp_path / name / "0.png")
        (tmp_path / name / "pairs.csv").write_text(f"image,caption\n0.png,{name}\n,none\n")
    data = open_captioned(str(tmp_path / "*" / "pairs.csv"))
    assert len(data) == 4  # rows without an image are samples, too
    assert [data[i].target for i in (0, 2)] == [["a"], ["b"]]
    assert data[2].image.tobytes() == picture(1, 1).tobytes()
    joined = open_captioned(str(tmp_path / "*" / "pairs.csv"), image_folder=tmp_path / "a")
    assert len(joined) == 3
    assert joined[0].target == ["a", "b"]


def test_coco(tmp_path: Path) -> None:
    path = coco(tmp_path, N)
    check(open_captioned(str(path), image_folder=tmp_path / "images"))


def test_karpathys_split(tmp_path: Path) -> None:
    names = write_pictures(tmp_path / "val2014", N)
    images = [
        {
            "filepath": "val2014",
            "filename": name,
            "split": "test",
            "sentences": [{"raw": text, "tokens": text.split()} for text in texts],
        }
        for name, texts in zip(names, captions(N), strict=True)
    ]
    images.insert(2, {**images[0], "split": "train"})
    path = tmp_path / "dataset_coco.json"
    path.write_text(json.dumps({"images": images, "dataset": "coco"}))
    check(open_captioned(str(path)))
    assert len(open_captioned(str(path), split="train")) == 1
    with pytest.raises(UsageError, match="--split 'val': the file has test, train"):
        open_captioned(str(path), split="val")


def test_shards_with_a_caption_in_each_line(tmp_path: Path) -> None:
    samples = [
        {"png": png(picture(i % 4, i)), "txt": "\n".join(texts).encode() + b"\n"}
        for i, texts in enumerate(captions(N))
    ]
    one = str(shard(tmp_path / "0.tar", samples))
    check(open_captioned(one))
    within = "a\u2028red\x85cat\x0con a mat"  # at all of which str.splitlines divides
    samples = [{"png": png(picture(0, 0)), "txt": f"{within}\r\nanother\n\n".encode()}]
    other = str(shard(tmp_path / "1.tar", samples))
    both = open_captioned(f"{other}::{one}")
    assert [both[i].target for i in range(2)] == [[within, "another"], captions(N)[0]]


def test_bad_rows_are_told(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2)
    path = tmp_path / "pairs.csv"
    path.write_bytes(
        b"image,caption\n0.png,one\n0.png,two,three\n1.png,\xff\xfe\n1.png,  \n,none\n9.png,x\n"
    )
    data = open_captioned(str(path))
    assert data.damage == [  # type: ignore[attr-defined]
        f"{path}: 2 rows left out, the first is 3 fields instead of 2: pairs.csv:row 2",
    ]
    assert data[0].target == ["one"]
    for index, reason in ((1, "empty caption"), (2, "no image"), (3, "missing image file")):
        with pytest.raises(BadSample, match=reason):
            data[index]


def test_what_is_no_captioned_data_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{")
    (tmp_path / "other.json").write_text('{"images": [{"id": 1}], "annotations": []}')
    (tmp_path / "empty.json").write_text('{"images": [], "annotations": []}')
    (tmp_path / "list.json").write_text("[1]")
    images = '{"id": 1, "file_name": "0.png"}'
    one = '[{"image_id": 2, "caption": "x"}]'
    (tmp_path / "twice.json").write_text(f'{{"images": [{images}, {images}], "annotations": []}}')
    (tmp_path / "other id.json").write_text(f'{{"images": [{images}], "annotations": {one}}}')
    (tmp_path / "columns.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.csv").write_text("image,caption\n")
    for name, message in (
        ("missing.json", "cannot be read"),
        ("no.json", "cannot be read"),
        ("other.json", "expected COCO's captions .* wrong at 'file_name'"),
        ("empty.json", "no image with a caption"),
        ("list.json", "expected COCO's captions"),
        ("twice.json", r"twice\.json: .* wrong at images, of which some have the same id"),
        ("other id.json", r"id\.json: .* wrong at 2"),
        ("columns.csv", "no image column .* its columns are 'a', 'b'"),
        ("empty.csv", "no rows"),
        ("missing.csv", "nothing matches"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            open_captioned(str(tmp_path / name))
        assert "\n" not in str(caught.value)
    shards = shard(tmp_path / "0.tar", [{"png": png(picture(0, 0)), "txt": b"a"}])
    for one in ("glyphs", caption_table(tmp_path / "pairs", 3)):
        with pytest.raises(UsageError, match=r": glyphs, tables and \.json files are evaluated wi"):
            open_captioned(f"{shards}::{one}")
    with pytest.raises(UsageError, match=r"image-folder: only a table .*, not .*0\.tar"):
        open_captioned(str(shards), image_folder=tmp_path)
    with pytest.raises(UsageError, match="only Karpathy's JSON files have splits"):
        open_captioned(str(tmp_path / "empty.csv"), split="test")


def test_columns_are_named_as_in_the_training_data() -> None:
    trained = {"csv_img_key": "photo", "csv_caption_key": "said::title", "csv_separator": ";"}
    for train_data, caption in (("a.jsonl::b.csv", None), ("a.jsonl", "said::title")):
        assert reading_of({**trained, "train_data": train_data}) == {
            "image_column": "photo",
            "query_column": None,
            "caption_column": caption,
            "separator": ";",
        }
    assert set(reading_of({}).values()) == {None}


def test_pairs_of_another_kind_are_refused(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"asked": "a", "answer": "b"}) + "\n")
    reading = reading_of({"csv_query_key": "asked"})
    assert len(open_val_data(str(texts), "hf:bert", "text", reading)) == 1
    table = str(caption_table(tmp_path, 3))
    with pytest.raises(UsageError, match=r"hf:bert takes texts with texts, but .* has images"):
        open_val_data(table, "hf:bert", "text", reading_of({}))
    with pytest.raises(UsageError, match=r"texts\.jsonl has no image column"):
        open_val_data(str(texts), "glyph-small", "image", reading)


def test_rows_of_one_first_text_are_joined(tmp_path: Path) -> None:
    rows = [("a", "1"), ("b", "1"), (" a ", "2"), ("a", "1"), ("", "3"), ("b", ""), ("A", "4")]
    parts = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    for part, path in enumerate(parts):
        lines = [json.dumps({"query": q, "answer": a}) + "\n" for q, a in rows[part::2]]
        path.write_text("".join(lines))
    for spec in (str(tmp_path / "*.jsonl"), "::".join(map(str, parts))):
        data = open_val_data(spec, "hf:bert", "text", reading_of({}))
        found, bad = [], []
        for i in range(len(data)):
            try:
                found.append((data[i].image, data[i].target))
            except BadSample as sample:
                bad.append(sample.reason)
        assert found == [("a", ["1", "2"]), ("A", ["4"]), ("b", ["1"])]
        assert sorted(bad) == ["empty caption", "empty query"]


def test_the_second_of_two_texts_is_whole_whatever_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"query": "a", "answer": "first line\n\nsecond line\n"}) + "\n")
    data = open_val_data(str(path), "hf:bert", "text", reading_of({}))
    assert data[0].target == ["first line\n\nsecond line"]
