from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from machinery import iconify
from machinery.iconify import IconSet, open_package, parse_set
from machinery.svg import draw_svg
from megabatch.errors import UsageError

from .iconify_set import PATH, icon_set, sets, write_folder, write_tarball


@pytest.fixture(scope="module")
def plain() -> IconSet:
    return parse_set(sets()["plain"])


def pixels(icons: IconSet, name: str, size: int = 24) -> np.ndarray:
    """The red pixels, (size, size) bool."""
    (icon,) = (icon for icon in icons.icons if icon.name == name)
    image = np.asarray(draw_svg(icon.svg.encode(), size)).astype(int)
    return (image[:, :, 0] > 200) & (image[:, :, 1] < 50)


def box(top: int, bottom: int, left: int, right: int) -> np.ndarray:
    expected = np.zeros((24, 24), dtype=bool)
    expected[top:bottom, left:right] = True
    return expected


def test_hidden_and_moving_icons_and_names_that_lead_nowhere_are_left_out(plain: IconSet):
    names = ["home-outline", "offset", "wide", "wide-again", "wide-left", "wide-up"]
    assert [icon.name for icon in plain.icons] == names
    assert plain.moving == 1


def test_a_set_says_whose_it_is(plain: IconSet):
    assert (plain.prefix, plain.title, plain.author) == ("plain", "Plain Set", "Ann")
    assert plain.license["spdx"] == "Apache-2.0"
    assert plain.category == "UI 24px"


def test_other_names_of_the_same_picture_are_kept(plain: IconSet):
    home = plain.icons[0]
    assert home.aliases == ("house-outline", "hut")
    assert home.categories == ("Buildings & Places", "Home Outline")


def test_a_box_is_in_the_middle_of_a_square(plain: IconSet):
    np.testing.assert_array_equal(pixels(plain, "wide"), box(6, 12, 0, 12))


def test_where_a_box_begins(plain: IconSet):
    found = pixels(plain, "offset", 48)  # the box begins at -6, -9.5
    assert np.argwhere(found).min(axis=0).tolist() == [19, 12]
    assert np.argwhere(found).max(axis=0).tolist() == [30, 35]


def test_mirrored_and_turned(plain: IconSet):
    np.testing.assert_array_equal(pixels(plain, "wide-left"), box(6, 12, 12, 24))
    # Mirrored, it is at the top right; a quarter turn clockwise moves that to the lower
    # right, of a box that is 12 wide and 24 high.
    np.testing.assert_array_equal(pixels(plain, "wide-up"), box(12, 24, 12, 18))
    np.testing.assert_array_equal(pixels(plain, "wide-again"), pixels(plain, "wide"))


def test_sixteen_pixels_where_nothing_else_is_said():
    document = icon_set("x", icons={"a": {"body": PATH}})
    del document["width"], document["height"]
    assert 'viewBox="0 0 16 16"' in parse_set(document).icons[0].svg


def test_folder_and_tarball_hold_the_same(tmp_path: Path):
    folder = write_folder(tmp_path / "unpacked" / "package").parent
    for path in (folder, folder / "package", write_tarball(tmp_path / "package.tgz")):
        with open_package(path) as package:
            assert package.version == "1.2.3"
            assert [each.prefix for each in package.sets()] == ["bi2-solid", "brands", "plain"]


def test_what_is_no_package(tmp_path: Path):
    folder = write_folder(tmp_path / "package")
    (folder / "json" / "plain.json").write_text('{"prefix": "plain"}')
    with open_package(folder) as package, pytest.raises(UsageError, match="is not IconifyJSON"):
        list(package.sets())
    (folder / "json" / "plain.json").unlink()
    with open_package(folder) as package, pytest.raises(UsageError, match="cannot read"):
        list(package.sets())
    (tmp_path / "text.tgz").write_text("text")
    for path in (folder / "json", tmp_path / "text.tgz", tmp_path / "nowhere.tgz"):
        with pytest.raises(UsageError, match="cannot read"), open_package(path):
            pass
    (folder / "package.json").write_text(json.dumps({}))
    with pytest.raises(UsageError, match="is not the npm package"), open_package(folder):
        pass


def test_without_a_package_npm_fetches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def pack(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["pack", "@iconify/json"]
        assert "--ignore-scripts" in command
        write_tarball(Path(command[-1]) / "iconify-json-1.2.3.tgz")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(iconify.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(iconify.subprocess, "run", pack)
    with open_package() as package:
        assert package.version == "1.2.3"


def test_npm_missing_or_failing(monkeypatch: pytest.MonkeyPatch):
    failed = subprocess.CompletedProcess([], 1, "", "npm error\nnetwork unreachable")
    monkeypatch.setattr(iconify.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(iconify.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(UsageError, match="npm error network unreachable"), open_package():
        pass
    monkeypatch.setattr(iconify.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"npm, .*is not installed.*--package"), open_package():
        pass
