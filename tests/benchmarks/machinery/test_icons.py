from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draw_icons
from machinery.icons import _drawn, icons_of, is_held_out, write_icons
from megabatch.data.images import decoded
from megabatch.data.sources import open_pairs

PATH = '<path fill="currentColor" d="M2 2h20v20H2z"/>'
CORNER = '<path fill="red" d="M0 0h12v6H0z"/>'


def icon_set(prefix: str, category: str = "UI 24px", **parts: Any) -> dict[str, Any]:
    license = {"title": "Apache 2.0", "spdx": "Apache-2.0", "url": "https://example.com"}
    info = {"name": prefix.title() + " Set", "author": {"name": "Ann"}, "license": license}
    return {
        "prefix": prefix,
        "info": {**info, "category": category},
        "icons": {},
        "width": 24,
        "height": 24,
        **parts,
    }


def sets() -> dict[str, dict[str, Any]]:
    plain = icon_set(
        "plain",
        icons={
            "home-outline": {"body": PATH},
            "linked": {"body": '<image href="a.png"/>'},
            "wide": {"body": CORNER, "width": 24, "height": 12, "top": 0},
            "gone": {"body": PATH, "hidden": True},
            "spinner": {"body": f"<g>{PATH}<animate/></g>"},
            "offset": {"body": CORNER, "left": -6, "top": -9.5},
        },
        aliases={
            "house-outline": {"parent": "home-outline"},
            "hut": {"parent": "house-outline"},
            "old-hut": {"parent": "home-outline", "hidden": True},
            "wide-left": {"parent": "wide", "hFlip": True},
            "wide-up": {"parent": "wide-left", "rotate": 1},
            "wide-again": {"parent": "wide-left", "hFlip": True},
            "nowhere": {"parent": "missing"},
            "gone-left": {"parent": "gone", "hFlip": True},
            "circle-a": {"parent": "circle-b", "vFlip": True},
            "circle-b": {"parent": "circle-a", "vFlip": True},
        },
        categories={"Buildings & Places": ["home-outline"], "Home Outline": ["home-outline"]},
    )
    logos = icon_set("brands", "Logos", icons={"acme": {"body": CORNER}, "home": {"body": PATH}})
    held_out = icon_set("bi2-solid", icons={"home-outline": {"body": PATH, "height": 12}})
    return {"plain": plain, "brands": logos, "bi2-solid": held_out}


def write_tarball(path: Path) -> Path:
    """Returns the path."""
    documents: dict[str, Any] = {
        "package.json": {"name": "@iconify/json", "version": "1.2.3"},
        "collections.json": {prefix: each["info"] for prefix, each in sets().items()},
        **{f"json/{prefix}.json": each for prefix, each in sets().items()},
    }
    with tarfile.open(path, "w:gz") as tar:
        for name, document in documents.items():
            data = json.dumps(document).encode()
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pixels(name: str, size: int = 24) -> np.ndarray:
    """Where the icon of the set `plain` is drawn, (size, size) bool."""
    (icon,) = (icon for icon in icons_of(sets()["plain"]) if icon.name == name)
    drawn = _drawn((icon.svg, size))
    assert isinstance(drawn, bytes)
    return np.frombuffer(drawn, np.uint8).reshape(size, size) < 128


def box(top: int, bottom: int, left: int, right: int) -> np.ndarray:
    expected = np.zeros((24, 24), dtype=bool)
    expected[top:bottom, left:right] = True
    return expected


def test_pairs_by_split_and_what_sets_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = write_tarball(tmp_path / "package.tgz")
    words = [str(package), f"--output={tmp_path / 'icons'}", "--size=32"]
    monkeypatch.setattr("sys.argv", ["draw_icons.py", *words])
    draw_icons.main()
    shown = capsys.readouterr().out
    assert "@iconify/json 1.2.3" in shown
    assert "train: 8 icons of 2 sets, 8 distinct captions" in shown
    assert "test: 1 icons of 1 sets, 1 distinct captions" in shown
    assert "left out 1 x with an image or entities" in shown
    train, test = (open_pairs(str(tmp_path / "icons" / split)) for split in ("train", "test"))
    assert [train[i].caption for i in range(4)] == [
        "acme, logos",
        "home, logos",
        "home outline, buildings & places",
        "offset",
    ]
    assert train[2].key == "00000.tar:plain_home-outline"
    assert (len(train), len(test), test[0].caption) == (8, 1, "home outline")
    image = decoded(train[1].image)
    assert (image.mode, image.size) == ("L", (32, 32))
    assert image.getextrema() == (0, 255)  # currentColor on white
    listed = json.loads((tmp_path / "icons" / "sets.json").read_text())
    assert listed["package"] == "@iconify/json 1.2.3"
    by_prefix = {each["prefix"]: each for each in listed["sets"]}
    assert by_prefix["bi2-solid"]["split"] == "test"
    assert by_prefix["plain"]["license"]["url"] == "https://example.com"
    assert by_prefix["plain"]["icons"] == 6
    write_icons(package, tmp_path / "again", size=32, workers=1)
    for path in (tmp_path / "icons").rglob("*.*"):
        other = tmp_path / "again" / path.relative_to(tmp_path / "icons")
        assert path.read_bytes() == other.read_bytes()


def test_whole_families_are_held_out() -> None:
    assert is_held_out("bi")
    assert is_held_out("bi2-solid")
    assert not is_held_out("material-symbols")
    held_out = sum(is_held_out(f"set{chr(97 + i % 26)}{i // 26 * 'x'}") for i in range(2000))
    assert held_out == pytest.approx(160, abs=40)


def test_hidden_and_moving_icons_and_names_that_lead_nowhere_are_left_out() -> None:
    found = icons_of(sets()["plain"])
    names = ["home-outline", "linked", "offset", "wide", "wide-again", "wide-left", "wide-up"]
    assert [icon.name for icon in found] == names
    assert found[0].categories == ("Buildings & Places", "Home Outline")


def test_boxes_are_in_the_middle_of_a_square_mirrored_and_turned() -> None:
    np.testing.assert_array_equal(pixels("wide"), box(6, 12, 0, 12))
    np.testing.assert_array_equal(pixels("wide-left"), box(6, 12, 12, 24))
    # Mirrored, it is at the top right; a quarter turn clockwise moves that to the lower
    # right, of a box that is 12 wide and 24 high.
    np.testing.assert_array_equal(pixels("wide-up"), box(12, 24, 12, 18))
    np.testing.assert_array_equal(pixels("wide-again"), pixels("wide"))
    found = np.argwhere(pixels("offset", 48))  # its box begins at -6, -9.5
    assert (found.min(axis=0).tolist(), found.max(axis=0).tolist()) == ([19, 12], [30, 35])
