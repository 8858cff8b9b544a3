from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.errors import UsageError
from megabatch.evaluation.val_data import open_val_data, reading_of
from tests.evaluation.material import caption_table

TRAINED = {"csv_img_key": "photo", "csv_caption_key": "said::title", "csv_separator": ";"}


@pytest.mark.parametrize(
    ("train_data", "val_data", "captions"),
    [
        ("a.jsonl::b.csv", "c.csv", None),
        ("a.jsonl::b.csv", "c.csv::d.csv::e.csv", None),
        ("a.jsonl::b.csv", "c.jsonl::d.csv", "said::title"),
        ("a.jsonl", "c.csv", "said::title"),  # one source: a column's name may have the joint
    ],
)
def test_columns_of_several_sources_hold_for_as_many(
    train_data: str, val_data: str, captions: str | None
) -> None:
    assert reading_of({**TRAINED, "train_data": train_data}, val_data) == {
        "image_column": "photo",
        "query_column": None,
        "caption_column": captions,
        "separator": ";",
        "svg_size": 224,
    }


def test_without_a_run_there_is_nothing_to_take_over() -> None:
    reading = reading_of({}, "c.csv")
    assert reading.pop("svg_size") == 224
    assert set(reading.values()) == {None}


def test_a_run_on_several_sources_reads_one_table(tmp_path: Path) -> None:
    table = str(caption_table(tmp_path, 3))
    trained = {**TRAINED, "csv_img_key": None, "train_data": "a.jsonl::b.csv"}
    reading = reading_of(trained, table) | {"separator": None}
    data = open_val_data(table, "glyph-small", "image", reading)
    assert len(data) == 3


def test_pairs_of_another_kind_are_refused(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"asked": "a", "answer": "b"}) + "\n")
    reading = reading_of({"csv_query_key": "asked"}, str(texts))
    assert len(open_val_data(str(texts), "hf:bert", "text", reading)) == 1
    table = str(caption_table(tmp_path, 3))
    with pytest.raises(UsageError, match=r"hf:bert takes texts with texts, but .* has images"):
        open_val_data(table, "hf:bert", "text", reading_of({}, table))
    with pytest.raises(UsageError, match=r"texts\.jsonl has no image column"):
        open_val_data(str(texts), "glyph-small", "image", reading)
