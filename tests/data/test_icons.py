from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megabatch.cli import main
from megabatch.data.iconify import Icon, IconSet, open_package
from megabatch.data.icons import caption, is_held_out, write_icons
from megabatch.data.pairs import caption_id
from megabatch.data.shards import TarSamples
from megabatch.data.sources import open_pairs
from megabatch.errors import UsageError

from .iconify_set import write_folder, write_tarball


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("package"))


def write(package: Path, output: Path, **options):
    with open_package(package) as opened:
        return write_icons(opened, output, **options)


def documents(shard: Path) -> list[dict]:
    samples = TarSamples([shard])
    return [json.loads(samples.read(i, "json")) for i in range(len(samples))]


def test_pairs_by_split(package: Path, tmp_path: Path):
    done = write(package, tmp_path / "icons")
    train, test = (open_pairs(str(tmp_path / "icons" / split)) for split in ("train", "test"))
    assert [train[i].caption for i in range(4)] == [
        "acme, logos",
        "home, logos",
        "home outline, buildings & places",
        "offset",
    ]
    assert test[0].caption == "home outline"
    assert (len(train), len(test)) == (done.icons["train"], done.icons["test"]) == (8, 1)
    assert dict(done.sets) == {"train": 2, "test": 1}
    assert dict(done.left_out) == {"moving": 1}
    colours = {colour for _, colour in train[1].image.getcolors()}
    assert {(0, 0, 0), (255, 255, 255)} <= colours  # currentColor on white


def test_what_a_sample_tells(package: Path, tmp_path: Path):
    write(package, tmp_path / "icons")
    home = documents(tmp_path / "icons" / "train" / "00000.tar")[2]
    assert home == {
        "caption": "home outline, buildings & places",
        "key": "plain_home-outline",
        "caption_id": caption_id("home outline, buildings & places"),
        "set": "plain",
        "set_title": "Plain Set",
        "categories": ["Buildings & Places", "Home Outline"],
        "license": "Apache-2.0",
        "aliases": ["house-outline", "hut"],
    }
    listed = json.loads((tmp_path / "icons" / "sets.json").read_text())
    assert listed["package"] == "@iconify/json 1.2.3"
    by_prefix = {each["prefix"]: each for each in listed["sets"]}
    assert by_prefix["bi2-solid"]["split"] == "test"
    assert by_prefix["plain"]["license"]["url"] == "https://example.com"
    assert by_prefix["plain"]["icons"] == 6


def test_ids_are_the_captions(package: Path, tmp_path: Path):
    write(package, tmp_path / "icons", set_title=True)
    facts = documents(tmp_path / "icons" / "train" / "00000.tar")
    assert facts[0]["caption"] == "acme, logos, brands set"
    assert all(each["caption_id"] == caption_id(each["caption"]) for each in facts)
    assert caption_id("home") == 2653348178510059753  # for good: shards already written hold it
    assert min(each["caption_id"] for each in facts) >= 0


def test_whole_families_are_held_out():
    assert is_held_out("bi")
    assert is_held_out("bi2-solid")
    assert not is_held_out("material-symbols")
    held_out = sum(is_held_out(f"set{chr(97 + i % 26)}{i // 26 * 'x'}") for i in range(2000))
    assert held_out == pytest.approx(160, abs=40)


def test_captions_say_nothing_twice():
    of = IconSet("x", "Title", "Flags / Maps", "Ann", {"title": "MIT"}, [], 0)
    icon = Icon("map-pin-filled", "", ("Maps", "Map Pin  Filled"), ())
    assert caption(icon, of) == "map pin filled, maps, flags"
    assert caption(icon, of, set_title=True) == "map pin filled, maps, flags, title"


@pytest.mark.parametrize("workers", [0, 1])
def test_png(package: Path, tmp_path: Path, workers: int):
    write(package, tmp_path / "svg")
    write(package, tmp_path / "png", kind="png", size=32, workers=workers)
    drawn = open_pairs(str(tmp_path / "png" / "train"))
    kept = open_pairs(str(tmp_path / "svg" / "train"), svg_size=32)
    assert len(drawn) == len(kept) == 8
    for i in range(8):
        assert drawn[i].caption == kept[i].caption
        np.testing.assert_array_equal(np.asarray(drawn[i].image), np.asarray(kept[i].image))


def test_shards_are_cut_and_the_same_again(package: Path, tmp_path: Path):
    for name in ("a", "b"):
        write(package, tmp_path / name, samples_per_shard=3)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    assert list(map(str, files)) == [
        "sets.json",
        "test/00000.tar",
        *(f"train/0000{i}.tar" for i in range(3)),
    ]
    assert all(
        (tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files
    )
    assert len(open_pairs(str(tmp_path / "a" / "train"))) == 8


def test_long_ones_can_be_left_out(package: Path, tmp_path: Path):
    done = write(package, tmp_path / "icons", max_bytes=220)
    assert done.left_out["longer than 220 bytes"] == 2  # those that are mirrored or turned
    assert done.icons["train"] == 6


def test_a_package_that_breaks_off_leaves_nothing(tmp_path: Path):
    folder = write_folder(tmp_path / "package")
    (folder / "json" / "plain.json").write_text("{")
    with pytest.raises(UsageError, match=r"plain\.json"):
        write(folder, tmp_path / "icons")
    assert [p.name for p in tmp_path.iterdir()] == ["package"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["data", "icons", "--output", str(tmp_path / "icons")]
    arguments += ["--package", str(write_tarball(tmp_path / "package.tgz"))]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "@iconify/json 1.2.3" in out
    assert "train: 8 icons of 2 sets, 8 distinct captions; 1 shard, " in out
    assert "test: 1 icon of 1 set, 1 distinct caption; 1 shard, " in out
    assert "left out 1 x moving" in out
    assert main(arguments) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert main([*arguments, "--size", "0"]) == 2
    assert "--size 0: expected at least 1" in capsys.readouterr().err
