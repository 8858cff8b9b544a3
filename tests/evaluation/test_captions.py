from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from megabatch.data.images import decoded
from megabatch.data.pairs import BadSample
from megabatch.data.tables import Wanted
from megabatch.errors import UsageError
from megabatch.evaluation.captions import open_captioned, open_val_data
from megabatch.evaluation.samples import Samples
from tests.evaluation.material import (
    caption_rows,
    caption_table,
    captions,
    picture,
    png,
    shard,
    write_pictures,
)

N = 7
COLUMNS = Wanted("photo", caption="said", lists=True)


def check(data: Samples) -> None:
    """The images of `material` with all their captions, in order."""
    assert len(data) == N
    for i, expected in enumerate(captions(N)):
        assert data[i].target == expected
        assert decoded(data[i].image).tobytes() == picture(i % 4, i).tobytes()


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def found(data: Samples) -> tuple[list[Any], list[str]]:
    """First elements and captions of usable samples; the reasons for the others."""
    good, bad = [], []
    for i in range(len(data)):
        try:
            good.append((decoded(data[i].image), data[i].target))
        except BadSample as sample:
            bad.append(sample.reason)
    return good, bad


def test_rows_of_one_image_are_joined_also_across_files(tmp_path: Path) -> None:
    check(open_captioned(str(caption_table(tmp_path, N))))
    rows = [{"photo": name, "said": text} for name, text in caption_rows(tmp_path, N)]
    for part, some in enumerate((rows[:N], rows[N:])):
        write_lines(tmp_path / f"{part}.jsonl", some)
        images = [(tmp_path / row["photo"]).read_bytes() for row in some]
        table = pa.table({"photo": images, "said": [row["said"] for row in some]})
        pyarrow.parquet.write_table(table, tmp_path / f"{part}.parquet")
    for kind in ("jsonl", "parquet"):
        check(open_captioned(str(tmp_path / f"*.{kind}"), COLUMNS))
    with pytest.raises(UsageError, match=r"no image column 'filepath' .* are 'photo', 'said'"):
        open_captioned(str(tmp_path / "*.jsonl"))


def test_lists_of_captions_and_image_bytes(tmp_path: Path) -> None:
    images: list[Any] = [png(picture(i % 4, i)) for i in range(N)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"image": images, "caption": captions(N)}), path)
    check(open_captioned(str(path)))
    names = write_pictures(tmp_path, N)
    lists = zip(names, captions(N), strict=True)
    rows = [{"photo": name, "said": [*texts, ""]} for name, texts in lists]
    check(open_captioned(write_lines(tmp_path / "a.jsonl", rows), COLUMNS))
    structs: list[Any] = [{"bytes": image, "path": None} for image in images[:-1]]
    table = pa.table({"photo": [*structs, {"path": names[-1]}], "said": captions(N)})
    file = pa.OSFile(str(tmp_path / "a.arrow"), "wb")
    with file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    data = open_captioned(str(tmp_path / "a.arrow"), COLUMNS)
    check(data)
    assert len(pickle.dumps(data)) < 5_000  # what a worker is sent
    check(pickle.loads(pickle.dumps(data)))


def test_the_same_name_in_another_folder_is_another_image(tmp_path: Path) -> None:
    for name, kind in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        picture(kind, kind).save(tmp_path / name / "0.png")
        (tmp_path / name / "pairs.csv").write_text(f"image,caption\n0.png,{name}\n,none\n")
    data = open_captioned(str(tmp_path / "*" / "pairs.csv"))
    assert len(data) == 4  # rows without an image are samples, too
    assert [data[i].target for i in (0, 2)] == [["a"], ["b"]]
    assert decoded(data[2].image).tobytes() == picture(1, 1).tobytes()


def test_shards_with_a_caption_in_each_line(tmp_path: Path) -> None:
    samples = [
        {"png": png(picture(i % 4, i)), "txt": "\n".join(texts).encode() + b"\n"}
        for i, texts in enumerate(captions(N))
    ]
    one = str(shard(tmp_path / "0.tar", samples))
    check(open_captioned(one))
    within = "a\u2028red\x85cat\x0con a mat"  # at all of which str.splitlines divides
    samples = [{"png": png(picture(0, 0)), "txt": f"{within}\r\nanother\n \n".encode()}]
    other = str(shard(tmp_path / "1.tar", samples))
    both = open_captioned(f"{other}::{one}")
    assert [both[i].target for i in range(2)] == [[within, "another"], captions(N)[0]]


def test_bad_rows_are_counted(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2)
    path = tmp_path / "pairs.csv"
    path.write_bytes(b"image,caption\n0.png,one\n1.png,\xff\xfe\n1.png,  \n,none\n9.png,x\n")
    data = open_captioned(str(path))
    assert data[0].target == ["one"]
    reasons = ["text is not UTF-8", "empty caption", "no image", "missing or unreadable image file"]
    assert found(data)[1] == reasons


def test_what_is_no_captioned_data_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "columns.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.csv").write_text("image,caption\n")
    (tmp_path / "coco.json").write_text("{}")
    for name, message in (
        ("coco.json", r"coco\.json; expected \.tar shards alone"),
        ("columns.csv", "no image column .* its columns are 'a', 'b'"),
        ("empty.csv", "no rows"),
        ("missing.csv", "nothing matches"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            open_captioned(str(tmp_path / name))
        assert "\n" not in str(caught.value)
    shards = shard(tmp_path / "0.tar", [{"png": png(picture(0, 0)), "txt": b"a"}])
    for one in ("glyphs", caption_table(tmp_path / "pairs", 3)):
        with pytest.raises(UsageError, match=": tables and glyphs are evaluated with no other"):
            open_captioned(f"{shards}::{one}")


def test_pairs_of_another_kind_are_refused(tmp_path: Path) -> None:
    texts = write_lines(tmp_path / "texts.jsonl", [{"asked": "a", "answer": "b"}])
    settings = {"csv_query_key": "asked"}
    assert len(open_val_data(texts, "hf:bert", "text", settings)) == 1
    table = str(caption_table(tmp_path, 3))
    with pytest.raises(UsageError, match=r"hf:bert takes texts with texts, but .* has images"):
        open_val_data(table, "hf:bert", "text", {})
    with pytest.raises(UsageError, match=r"texts\.jsonl has no image column"):
        open_val_data(texts, "glyph-small", "image", settings)


def test_rows_of_one_first_text_are_joined_and_second_ones_are_whole(tmp_path: Path) -> None:
    rows = [("a", "1"), ("b", "1"), (" a ", "2"), ("a", "1"), ("", "3"), ("b", ""), ("A", "4")]
    for part in range(2):
        some = [{"query": query, "answer": answer} for query, answer in rows[part::2]]
        write_lines(tmp_path / f"{part}.jsonl", some)
    data = open_val_data(str(tmp_path / "*.jsonl"), "hf:bert", "text", {})
    good, bad = found(data)
    assert good == [("a", ["1", "2"]), ("A", ["4"]), ("b", ["1"])]
    assert sorted(bad) == ["empty caption", "empty query"]
    answer = "first line\n\nsecond line"
    path = write_lines(tmp_path / "texts.jsonl", [{"query": "a", "answer": answer + "\n"}])
    assert open_val_data(path, "hf:bert", "text", {})[0].target == [answer]
