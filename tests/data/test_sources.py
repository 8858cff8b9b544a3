from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.config.settings import Batches
from megabatch.data.loader import Batch, PairLoader
from megabatch.data.order import MixedPairs, Part, order_of, parts_of
from megabatch.data.pairs import PairDataset, caption_id
from megabatch.data.shards import ShardPairs
from megabatch.data.sources import open_pairs
from megabatch.errors import UsageError

from . import samples
from .samples import Numbers, png, sample, to_pixels_and_noise, to_tokens, write_tar


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for i in range(4):
        write_tar(tmp_path / "shards" / f"{i:05d}.tar", sample("0", i, f"caption {i}"))
    return tmp_path / "shards"


def captions(spec: str) -> list[str]:
    return samples.captions(open_pairs(spec))


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
    (shards / "00000.parquet").write_bytes(b"metadata of img2dataset")
    assert isinstance(open_pairs(f"{shards}{spec}"), ShardPairs)
    assert captions(f"{shards}{spec}") == [f"caption {i}" for i in expected]


def test_names_that_look_like_patterns(tmp_path: Path):
    path = write_tar(tmp_path / "{a,b}::[c].tar", sample("0", 0, "odd name"))
    assert captions(str(path)) == ["odd name"]


def test_a_folder_of_tables(tmp_path: Path):
    (tmp_path / "0.png").write_bytes(png())
    (tmp_path / "b.csv").write_text("filepath,title\n0.png,second\n")
    (tmp_path / "a.tsv").write_text("image\tcaption\n0.png\tfirst\n")
    line = b'{"image": "0.png", "text": "third"}'
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(line))
    (tmp_path / "readme.json").write_text("{}")
    assert captions(str(tmp_path)) == ["first", "second", "third"]


@pytest.mark.parametrize("spec", ["nowhere", "nowhere/*.tar", "no-{0..2}.csv", "https://x/0.tar"])
def test_nothing_matches(tmp_path: Path, monkeypatch, spec: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"nothing matches (nowhere|no-0|https)"):
        open_pairs(spec)


def test_sources_of_several_kinds_and_their_factors(shards: Path, tmp_path: Path):
    (tmp_path / "0.png").write_bytes(png())
    (tmp_path / "a.jsonl").write_text('{"image": "0.png", "what": "of JSON"}\n')
    (tmp_path / "b.csv").write_text("filepath,what\n0.png,of CSV\n")
    spec = f"{shards}/00001.tar::{tmp_path}/a.jsonl::{tmp_path}/b.csv"
    pairs = open_pairs(spec, caption_column="what")
    assert [pairs[i].caption for i in range(3)] == ["caption 1", "of JSON", "of CSV"]
    weighted = open_pairs(
        f"{shards}::{tmp_path}/b.csv", caption_column="what", upsampling_factors="0.5::3"
    )
    assert parts_of(weighted) == [Part(4, 2), Part(1, 3)]
    assert parts_of(open_pairs(str(shards), upsampling_factors="0.5")) == [Part(4, 2)]
    (tmp_path / "c.jsonl").write_text('{"query": "q", "positive": "p"}')
    with pytest.raises(UsageError, match=r"00001\.tar has images with texts, but .*c\.jsonl texts"):
        open_pairs(f"{shards}/00001.tar::{tmp_path}/c.jsonl")


@pytest.mark.parametrize("factors", ["1", "1::2::3", "1::0", "1::nan", "inf::1", "", "1::"])
def test_factors_that_cannot_be(shards: Path, factors: str):
    told = f"--train-data-upsampling-factors: '{factors}'; expected 2 numbers above 0, one for each"
    with pytest.raises(UsageError, match=told):
        open_pairs(f"{shards}::{shards}", upsampling_factors=factors)
    with pytest.raises(UsageError, match="of which an epoch draws 0; expected 1 or more"):
        open_pairs(f"{shards}::{shards}", upsampling_factors="1::0.1")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("{0}/0000{{2..4}}.tar", r"nothing matches .*/00004\.tar \(from '.*\.\.4"),
        ("{0}/..", r"no \.tar shards and no .* tables in the folder"),
        ("{0}/../a.txt", r"a\.txt; expected \.tar shards alone"),
        ("{0}/{{00000.tar,a.csv}}", r"00000\.tar, .*a\.csv; expected \.tar shards alone"),
        ("{0}::{0}/bad.tar", r"bad\.tar: none of 2 .*: no caption: bad\.tar:0"),
        ("", "expected sources joined by '::', but one is empty"),
        ("{0}::", "expected sources joined by '::', but one is empty"),
        ("::{0}", "expected sources joined by '::', but one is empty"),
    ],
)
def test_sources_that_cannot_be(shards: Path, tmp_path: Path, spec: str, expected: str):
    (tmp_path / "a.txt").write_text("a")
    (shards / "a.csv").write_text("filepath,title\n")
    write_tar(shards / "bad.tar", [("0.png", png()), ("1.png", png())])
    with pytest.raises(UsageError, match=expected):
        open_pairs(spec.format(shards))


def mixed(
    factors: list[float] | None = None, bad: tuple[int, ...] = (), **options: Any
) -> MixedPairs:
    """30 samples, 10 and 20, of captions 0 .. 29, 0 .. 9 and 0 .. 19."""
    sources: list[PairDataset] = [Numbers(30), Numbers(10, bad), Numbers(20)]
    return MixedPairs(sources, ["a", "b", "c"], factors, **options)


def loader(pairs: MixedPairs, **options: Any) -> PairLoader:
    settings = {"batch_size": 10, "transform": to_pixels_and_noise, "tokenizer": to_tokens}
    return PairLoader(pairs, **{**settings, "seed": 5, **options})


def test_without_factors_it_is_one_data_set():
    for factors in (None, [1.0, 1, 1]):
        pairs = pickle.loads(pickle.dumps(mixed(factors, bad=(3,))))
        expected = [*map(str, range(30)), *map(str, range(10)), *map(str, range(20))]
        expected[33] = "(odd)"
        assert samples.captions(pairs) == expected
        assert pairs.parts == [Part(60, 60)]
        assert pairs.shares == []
        state = loader(pairs).state_dict()
        loader(Numbers(60)).load_state_dict(state)  # type: ignore[arg-type]


def test_factors_are_how_often_a_sample_comes_each_time_augmented_anew():
    pairs = mixed([1, 2, 0.5])
    assert order_of(pairs, 10).pairs == 30 + 20 + 10
    assert pairs.shares[1:] == [
        "b: 10 pairs, of which an epoch draws 20 (33.3%)",
        "c: 20 pairs, of which an epoch draws 10 (16.7%)",
    ]
    data = loader(pairs)
    assert data.batches_per_epoch == 6
    images: dict[int, set[float]] = {}
    for batch in [*data, *data]:
        assert batch.ids.tolist() == [caption_id(str(n)) for n in batch.texts[:, 0].tolist()]
        for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
            images.setdefault(index, set()).add(image.sum().item())
    assert [len(images[i]) for i in range(60)] == [2] * 30 + [4] * 10 + [1] * 20


def three_epochs(data: PairLoader) -> list[Batch]:
    batches = []
    while data.epoch < 3:
        batches += list(data)
    return batches


@pytest.mark.parametrize(("workers", "batches"), [(0, "mixed"), (1, "mixed"), (1, "one-source")])
def test_mixtures_resume_with_other_ranks_and_workers(workers: int, batches: Batches):
    factors = [0.4, 2.5, 1]  # 12 + 25 + 20 samples: 8 batches of 7 an epoch, or 1 + 3 + 2
    whole = three_epochs(loader(mixed(factors, batches=batches), batch_size=7))
    assert len(whole) == (24 if batches == "mixed" else 18)
    for stop in (2, 8, 13):
        data = loader(mixed(factors, batches=batches), batch_size=7)
        for _ in range(stop):
            next(iter(data))
        state = json.loads(json.dumps(data.state_dict()))
        parts = []
        for rank in range(2):
            share = {"batch_size": 7, "rank": rank, "world_size": 2}
            again = loader(mixed(factors, batches=batches), workers=workers, **share)
            again.load_state_dict(state)
            parts.append(three_epochs(again))
        for left, right, expected in zip(*parts, whole[stop:], strict=True):
            assert left.indices.tolist() + right.indices.tolist() == expected.indices.tolist()
            assert torch.equal(torch.cat([left.images, right.images]), expected.images)


def test_a_state_of_other_factors_is_refused():
    state = loader(mixed([1, 2, 1])).state_dict()
    with pytest.raises(UsageError, match=r"parts was \[\[30, 30\], .* is \[\[30, 20\]"):
        loader(mixed([2 / 3, 3, 1])).load_state_dict(state)
    with pytest.raises(UsageError, match=r"pairs was 70, is 60.*parts was .* is None"):
        loader(mixed()).load_state_dict(state)
    one = loader(mixed(batches="one-source")).state_dict()
    with pytest.raises(UsageError, match="batches was 10 of a source, is None"):
        loader(mixed()).load_state_dict(one)
    with pytest.raises(UsageError, match="batches was 10 of a source, is 5 of a source"):
        loader(mixed(batches="one-source"), batch_size=5).load_state_dict(one)


def test_a_temperature_moves_the_draws_towards_equal_ones_of_as_many_pairs():
    def drawn(*arguments: Any, **options: Any) -> list[int]:
        return [part.drawn for part in mixed(*arguments, **options).parts]

    assert drawn(temperature=1) == [60]  # one data set, as without
    assert drawn(temperature=2) == [25, 14, 20]  # in proportion to the roots of 30, 10, 20
    assert drawn([1, 3, 1.5], temperature=1e9) == [30, 30, 30]
    assert drawn(temperature=0.5) == [39, 4, 17]
    assert drawn(batches="in-turn") == [20, 20, 20]
    assert mixed(temperature=2).shares[0] == "a: 30 pairs, of which an epoch draws 25 (42.4%)"
    with pytest.raises(UsageError, match=r"^--train-data-temperature: b: .* draws 0; expected 1"):
        mixed(temperature=0.1)


def test_a_batch_of_one_source_says_which_and_lacks_bad_samples():
    data = loader(mixed(bad=(3,), batches="in-turn"), batch_size=5)
    batches = [*data]
    assert [data.source_of(batch) for batch in batches] == [0, 1, 2] * 4
    assert sorted(map(len, batches)) == [4, 4] + [5] * 10
    assert loader(mixed()).source_of(batches[0]) is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"batches": "one-source", "batch_size": 11},
            r"11, 10 pairs: .* \(the pairs of b in an ep",
        ),
        ({"batches": "in_turn"}, r"--train-data-batches in_turn: expected mixed, one-source, in-"),
        ({"batches": "in-turn", "factors": [1, 1, 2]}, "in-turn: expected without --train-data-up"),
        ({"batches": "in-turn", "temperature": 2}, "expected without .* and --train-data-temper"),
        ({"temperature": -1.0}, r"--train-data-temperature -1\.0: expected a number above 0"),
    ],
)
def test_mixtures_that_cannot_be(options: dict[str, Any], told: str):
    size = options.pop("batch_size", 5)
    with pytest.raises(UsageError, match=told):
        loader(mixed(**options), batch_size=size)


def test_prefixes_are_of_each_source_and_do_not_count_in_ids(tmp_path: Path):
    for name in ("a", "b"):
        row = {"query": f"{name}?", "positive": "same", "negatives": ["no", "never"]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    spec = f"{tmp_path}/a.jsonl::{tmp_path}/b.jsonl"
    pairs = open_pairs(
        spec, query_prefix=r"query: ::Task\nQ: ", caption_prefix="doc: ", negatives=True
    )
    a, b = pickle.loads(pickle.dumps(pairs))
    assert (a.image, a.caption, a.negatives) == (
        "query: a?",
        "doc: same",
        ("doc: no", "doc: never"),
    )
    assert (b.image, b.caption) == ("Task\nQ: b?", "doc: same")
    assert a.id == b.id == caption_id("same")
    assert open_pairs(spec, caption_prefix="::doc: ")[0].caption == "same"
    with pytest.raises(
        UsageError, match=r"--caption-prefix: 'a::b::c'; expected one prefix, or 2 "
    ):
        open_pairs(spec, caption_prefix="a::b::c")
    with pytest.raises(UsageError, match=r"--train-data-batches: expected several sources"):
        open_pairs(str(tmp_path / "*.jsonl"), batches="one-source")


def test_images_take_prefixes_of_captions_alone(shards: Path):
    assert open_pairs(str(shards), caption_prefix="alt: ")[0].caption == "alt: caption 0"
    with pytest.raises(UsageError, match=r"^--query-prefix 'q: ': .*shards has images; expected"):
        open_pairs(f"{shards}::{shards}", query_prefix="::q: ")
