from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from megabatch.data.pairs import BadSample, decoded
from megabatch.data.sources import open_pairs
from megabatch.errors import UsageError

from .samples import png


def save(folder: Path, columns: dict[str, Any], *, shards: int = 1, rows_at_once: int = 2) -> Path:
    """Write a folder like `save_to_disk`: Arrow streams of record batches, and their list."""
    folder.mkdir(parents=True)
    table = pa.table(columns)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    per_shard = -(-len(table) // shards)
    for number, name in enumerate(names):
        part = table.slice(number * per_shard, per_shard)
        file = pa.OSFile(str(folder / name), "wb")
        with file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(part, max_chunksize=rows_at_once)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def pictures(n: int = 5) -> dict[str, Any]:
    images = [{"bytes": png(i), "path": None} for i in range(n)]
    return {"image": images, "text": [f"caption {i}" for i in range(n)]}


def check(pairs: Any, n: int = 5) -> None:
    assert [pair.caption for pair in pairs] == [f"caption {i}" for i in range(n)]
    assert [decoded(pair.image).getpixel((0, 0))[0] for pair in pairs] == list(range(n))


@pytest.mark.parametrize("shards", [1, 3])
def test_images_with_captions(tmp_path: Path, shards: int):
    pairs = open_pairs(str(save(tmp_path / "set", pictures(), shards=shards)))
    check(pairs)
    assert pairs[0].key == f"data-00000-of-{shards:05d}.arrow:row 1"
    check(pickle.loads(pickle.dumps(pairs)))


def test_what_is_sent_to_a_worker_is_small(tmp_path: Path):
    columns = {"text": ["a" * 1000] * 1000, "query": ["b" * 1000] * 1000}
    pairs = open_pairs(str(save(tmp_path / "set", columns)))
    assert len(pickle.dumps(pairs)) < 2_000


def test_what_datasets_itself_writes(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = {
        "picture": [Image.new("RGB", (4, 3), (i, 0, 0)) for i in range(6)],
        "label": [0, 1] * 3,
        "words": [f"caption {i}" for i in range(6)],
    }
    features = datasets.Features(
        picture=datasets.Image(),
        label=datasets.ClassLabel(names=["a", "b"]),
        words=datasets.Value("string"),
    )
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(tmp_path / "one", num_shards=2)
    columns = {"image_column": "picture", "caption_column": "words"}
    check(open_pairs(str(tmp_path / "one"), **columns), 6)
    selected = made.select([5, 4, 3]).sort("words")  # an order that is not the file's
    datasets.DatasetDict(train=selected, test=made).save_to_disk(tmp_path / "splits")
    train = open_pairs(str(tmp_path / "splits" / "train"), **columns)
    assert [train[i].caption for i in range(3)] == ["caption 3", "caption 4", "caption 5"]
    check(open_pairs(str(tmp_path / "splits" / "test"), **columns), 6)
    with pytest.raises(UsageError, match=r"column 'label' holds int64; expected texts"):
        open_pairs(str(tmp_path / "one"), image_column="picture", caption_column="label")


def test_arrow_files_by_themselves(tmp_path: Path):
    folder = save(tmp_path / "set", pictures(), shards=2)
    check(open_pairs(f"{folder}/data-*.arrow"))
    indexed = tmp_path / "indexed.arrow"
    table = pa.table(pictures())
    with pa.OSFile(str(indexed), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    check(open_pairs(str(indexed)))


def test_nulls_and_images_by_path(tmp_path: Path):
    folder = save(
        tmp_path / "set",
        {
            "image": [{"bytes": None, "path": p} for p in ("0.png", None, "9.png")],
            "text": ["a", "b", "c"],
        },
    )
    (folder / "0.png").write_bytes(png(7))
    pairs = open_pairs(str(folder))
    assert decoded(pairs[0].image).getpixel((0, 0)) == (7, 0, 0)
    for index, reason in ((1, "no image"), (2, "missing image file")):
        with pytest.raises(BadSample, match=reason):
            pairs[index]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"image": [1], "text": ["a"]}, "column 'image' holds int64; expected images"),
        ({"image": ["a"], "text": [["a", "b"]]}, "'text' holds list<.*>; expected texts"),
        ({"picture": ["a"], "text": ["a"]}, "no image column 'filepath' .* 'picture', 'text'"),
    ],
)
def test_columns_of_another_kind(tmp_path: Path, columns: dict[str, Any], expected: str):
    with pytest.raises(UsageError, match=expected):
        open_pairs(str(save(tmp_path / "set", columns)))


def test_results_that_datasets_has_cached_are_left_out(tmp_path: Path):
    folder = save(tmp_path / "set", pictures(), shards=3)
    (folder / "cache-0123.arrow").write_bytes(b"a result of map")
    check(open_pairs(str(folder)))


@pytest.mark.parametrize("data", [b"", b"ARROW1", b"no arrow file at all"])
def test_a_damaged_file(tmp_path: Path, data: bytes):
    folder = save(tmp_path / "set", pictures())
    (folder / "data-00000-of-00001.arrow").write_bytes(data)
    with pytest.raises(UsageError, match=r"cannot read .*data-00000-of-00001\.arrow"):
        open_pairs(str(folder))


def test_a_file_that_is_missing(tmp_path: Path):
    folder = save(tmp_path / "saved", pictures(), shards=3)
    next(folder.glob("data-00001-of-*")).unlink()
    with pytest.raises(UsageError, match="has 2 of the 3 files saved"):
        open_pairs(str(folder))
