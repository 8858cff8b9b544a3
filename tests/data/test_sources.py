from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from megabatch.data.glyphs import GlyphPairs
from megabatch.data.order import pairs_per_epoch, parts_of
from megabatch.data.shards import ShardPairs
from megabatch.data.sources import find_files, open_pairs
from megabatch.errors import UsageError

from .samples import png, sample, write_tar


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for i in range(4):
        write_tar(tmp_path / "shards" / f"{i:05d}.tar", sample("0", i, f"caption {i}"))
    return tmp_path / "shards"


def captions(spec: str) -> list[str]:
    pairs = open_pairs(spec)
    return [pairs[i].caption for i in range(len(pairs))]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("", [0, 1, 2, 3]),
        ("/00002.tar", [2]),
        ("/{00001..00003}.tar", [1, 2, 3]),
        ("/{00003,00000}.tar", [3, 0]),
        ("/*2.tar", [2]),
        ("/0000[13].tar", [1, 3]),
    ],
)
def test_shards(shards: Path, spec: str, expected: list[int]):
    assert isinstance(open_pairs(f"{shards}{spec}"), ShardPairs)
    assert captions(f"{shards}{spec}") == [f"caption {i}" for i in expected]


def test_several_joined(shards: Path):
    assert captions(f"{shards}/00003.tar::{shards}/0000{{0..1}}.tar") == [
        "caption 3",
        "caption 0",
        "caption 1",
    ]


def test_names_that_look_like_patterns(tmp_path: Path):
    path = write_tar(tmp_path / "{a,b}::[c].tar", sample("0", 0, "odd name"))
    assert captions(str(path)) == ["odd name"]


def test_a_folder_of_tables(tmp_path: Path):
    (tmp_path / "0.png").write_bytes(png())
    (tmp_path / "b.csv").write_text("filepath,title\n0.png,second\n")
    (tmp_path / "a.tsv").write_text("image\tcaption\n0.png\tfirst\n")
    assert captions(str(tmp_path)) == ["first", "second"]


def test_the_tables_that_img2dataset_leaves_beside_shards(shards: Path):
    (shards / "00000.parquet").write_bytes(b"metadata")
    (shards / "00000_stats.json").write_text("{}")
    assert len(find_files(str(shards))) == 4


def test_named_columns_reach_the_table(tmp_path: Path):
    (tmp_path / "0.png").write_bytes(png())
    (tmp_path / "a.csv").write_text("where;what\n0.png;it\n")
    options = {"image_column": "where", "caption_column": "what", "separator": ";"}
    assert open_pairs(str(tmp_path / "a.csv"), **options)[0].caption == "it"


def test_glyphs():
    pairs = open_pairs("glyphs")
    assert isinstance(pairs, GlyphPairs)
    assert len(pairs) == 36_098
    assert len(open_pairs("glyphs", split="characters")) == 3_097
    with pytest.raises(UsageError, match="no split 'test'; expected one of train"):
        open_pairs("glyphs", split="test")


def test_only_glyphs_have_splits(shards: Path):
    with pytest.raises(UsageError, match="only the glyphs have splits"):
        open_pairs(str(shards), split="train")


@pytest.mark.parametrize("spec", ["nowhere", "nowhere/*.tar", "no-{0..2}.csv", "https://x/0.tar"])
def test_nothing_matches(tmp_path: Path, monkeypatch, spec: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"nothing matches (nowhere|no-0|https)"):
        open_pairs(spec)


def test_one_of_a_pattern_is_missing(shards: Path):
    with pytest.raises(UsageError, match=r"nothing matches .*/00004\.tar \(from '.*\.\.00004"):
        open_pairs(f"{shards}/{{00002..00004}}.tar")


def test_a_folder_with_nothing_of_use(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UsageError, match=r"no \.tar shards and no .* tables in the folder"):
        open_pairs(str(tmp_path))
    with pytest.raises(UsageError, match=r"a\.txt is neither a \.tar shard nor a"):
        open_pairs(str(tmp_path / "a.txt"))


def test_mixed_kinds(shards: Path):
    (shards / "a.csv").write_text("filepath,title\n")
    with pytest.raises(UsageError, match=r"mixes shards .* and tables"):
        open_pairs(f"{shards}/{{00000.tar,a.csv}}")


def test_sources_of_several_kinds(shards: Path, tmp_path: Path):
    (tmp_path / "0.png").write_bytes(png())
    (tmp_path / "a.jsonl").write_text('{"image": "0.png", "text": "of JSON"}\n')
    (tmp_path / "b.csv").write_text("where,what\n0.png,of CSV\n")
    spec = f"{shards}/00001.tar::{tmp_path}/a.jsonl::{tmp_path}/b.csv"
    pairs = open_pairs(spec, image_column="::image::where", caption_column="::text::what")
    assert [pairs[i].caption for i in range(3)] == ["caption 1", "of JSON", "of CSV"]
    weighted = open_pairs(
        f"{shards}::{tmp_path}/a.jsonl", caption_column="text", upsampling_factors=[0.5, 3]
    )
    assert len(weighted) == 5
    assert [(part.size, part.drawn) for part in parts_of(weighted)] == [(4, 2), (1, 3)]


def test_one_source_with_a_factor(shards: Path):
    pairs = open_pairs(str(shards), upsampling_factors=[0.5])
    assert pairs_per_epoch(pairs) == 2
    with pytest.raises(UsageError, match=r"'1::2': expected 1 numbers, one for each source, got 2"):
        open_pairs(str(shards), upsampling_factors=[1, 2])


def test_columns_for_another_number_of_sources(tmp_path: Path):
    (tmp_path / "a.csv").write_text("a::b,c\nx,y.png\n")
    (tmp_path / "y.png").write_bytes(png())
    with pytest.raises(
        UsageError, match=r"--csv-caption-key: 'x::y' names 2; expected one, or .* 3"
    ):
        open_pairs("a.csv::b.csv::c.csv", caption_column="x::y")
    pairs = open_pairs(str(tmp_path / "a.csv"), image_column="c", caption_column="a::b")
    assert len(pairs) == 1  # of one source it is one name


@pytest.mark.parametrize("spec", ["", "a.csv::", "::a.csv", "a.csv::::b.csv"])
def test_an_empty_source(spec: str):
    with pytest.raises(UsageError, match="expected sources joined by '::', but one is empty"):
        open_pairs(spec)


def test_a_folder_of_compressed_json_lines(tmp_path: Path):
    for name in ("b", "a"):
        data = gzip.compress(b'{"query": "q", "answer": "%s"}\n' % name.encode())
        (tmp_path / f"{name}.jsonl.gz").write_bytes(data)
    (tmp_path / "readme.json").write_text("{}")
    assert captions(str(tmp_path)) == ["a", "b"]
