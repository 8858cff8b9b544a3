from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from machinery.grey import GreyWriter
from machinery.icon_set import caption, is_held_out, write_icons
from machinery.iconify import Icon, IconSet, open_package
from megabatch.data.pairs import caption_id
from megabatch.data.sources import open_pairs
from megabatch.errors import UsageError
from tests.benchmarks.test_scripts import run

from .iconify_set import write_folder, write_tarball


def write(package: Path, output: Path, **options):
    with open_package(package) as opened:
        return write_icons(opened, output, **options)


def test_pairs_by_split_and_what_sets_say(tmp_path: Path):
    package = write_folder(tmp_path / "package")
    done = write(package, tmp_path / "icons", size=32)
    train, test = (open_pairs(str(tmp_path / "icons" / split)) for split in ("train", "test"))
    assert [train[i].caption for i in range(4)] == [
        "acme, logos",
        "home, logos",
        "home outline, buildings & places",
        "offset",
    ]
    assert train[2].key == "plain_home-outline"
    assert all(train[i].id == caption_id(train[i].caption) for i in range(8))
    assert test[0].caption == "home outline"
    assert (len(train), len(test)) == (done.icons["train"], done.icons["test"]) == (8, 1)
    assert dict(done.sets) == {"train": 2, "test": 1}
    assert dict(done.left_out) == {"moving": 1}
    assert train[1].image.getextrema() == (0, 255)  # currentColor on white
    listed = json.loads((tmp_path / "icons" / "sets.json").read_text())
    assert listed["package"] == "@iconify/json 1.2.3"
    by_prefix = {each["prefix"]: each for each in listed["sets"]}
    assert by_prefix["bi2-solid"]["split"] == "test"
    assert by_prefix["plain"]["license"]["url"] == "https://example.com"
    assert by_prefix["plain"]["icons"] == 6
    write(package, tmp_path / "again", size=32, workers=1)
    for path in (tmp_path / "icons").rglob("*.*"):
        other = tmp_path / "again" / path.relative_to(tmp_path / "icons")
        assert path.read_bytes() == other.read_bytes()


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


def test_a_package_that_breaks_off_leaves_nothing(tmp_path: Path):
    folder = write_folder(tmp_path / "package")
    (folder / "json" / "plain.json").write_text("{")
    with pytest.raises(UsageError, match=r"plain\.json"):
        write(folder, tmp_path / "icons")
    assert [p.name for p in tmp_path.iterdir()] == ["package"]


def test_the_script(tmp_path: Path):
    package = write_tarball(tmp_path / "package.tgz")
    shown = run("draw_icons.py", f"--output={tmp_path / 'icons'}", f"--package={package}")
    assert "@iconify/json 1.2.3" in shown
    assert "train: 8 icons of 2 sets, 8 distinct captions" in shown
    assert "test: 1 icons of 1 sets, 1 distinct captions" in shown
    assert "left out 1 x moving" in shown


def test_pixels_of_another_size_are_refused(tmp_path: Path):
    writer = GreyWriter(tmp_path / "grey", 4)
    with pytest.raises(ValueError, match="15 bytes; expected 4²"):
        writer.write(bytes(15), key="k", number=0, caption="c")
    writer.write(bytes(np.arange(16, dtype=np.uint8)), key="k", number=0, caption=" a\tb ")
    writer.close()
    assert open_pairs(str(tmp_path / "grey"))[0].caption == "a b"
