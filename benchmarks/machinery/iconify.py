"""The icon sets of the npm package @iconify/json, as SVG files with names and categories.

The package has a JSON file for each set, in the IconifyJSON format: the inner part of each icon's
SVG, defaults for its box, aliases, categories, the author and the licence.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.errors import UsageError, one_line

NPM_NAME = "@iconify/json"

_BOX = {"left": 0, "top": 0, "width": 16, "height": 16}  # IconifyJSON's own defaults
#: Tags of animated icons.
MOVING = ("<animate", "<set ")


@dataclass(frozen=True)
class Icon:
    """An icon: its name in the set, an SVG file, the set's categories for it, its aliases."""

    name: str
    svg: str
    categories: tuple[str, ...]
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class IconSet:
    """A set's icons without the animated ones; `moving` is the number of those.

    category: of the whole set, such as "Logos"; it may be empty. license: title and, if there are
    any, spdx and url.
    """

    prefix: str
    title: str
    category: str
    author: str
    license: dict[str, str]
    icons: list[Icon]
    moving: int


@dataclass(frozen=True)
class Package:
    """An opened package; `read` returns the parsed JSON of one of its files."""

    version: str
    prefixes: list[str]
    read: Callable[[str], Any]

    def sets(self) -> Iterator[IconSet]:
        """Read the package's sets one by one, sorted by prefix.

        Raises:
            UsageError: a file is missing or is not IconifyJSON.
        """
        for prefix in self.prefixes:
            document = self.read(f"json/{prefix}.json")
            try:
                yield parse_set(document)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                what = f"{type(error).__name__} {error}"
                raise UsageError(f"json/{prefix}.json is not IconifyJSON: {what}") from error


@contextlib.contextmanager
def open_package(path: Path | None = None) -> Iterator[Package]:
    """Open the package: its tarball, its unpacked folder, or by default a download through npm.

    Raises:
        UsageError: it cannot be fetched or read.
    """
    with contextlib.ExitStack() as stack:
        if path is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megabatch-icons-"))
            path = _download(Path(folder))
        read = _folder_reader(path) if path.is_dir() else stack.enter_context(_tar_reader(path))
        try:
            version = str(read("package.json")["version"])
            prefixes = sorted(read("collections.json"))
        except (KeyError, TypeError) as error:
            raise UsageError(f"{path} is not the npm package {NPM_NAME}: no {error}") from error
        yield Package(version, prefixes, read)


def parse_set(document: dict[str, Any]) -> IconSet:
    """Parse an IconifyJSON document.

    Hidden icons (withdrawn ones, kept for old pages) are left out. An alias of an unchanged icon is
    added to that icon's `aliases`; an alias of a rotated or mirrored one becomes an icon.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: the document is not IconifyJSON.
    """
    info = document["info"]
    categories: dict[str, list[str]] = {}
    for category, names in document.get("categories", {}).items():
        for name in names:
            categories.setdefault(name, []).append(category)
    resolved = {name: _resolve(document, name) for name in _names(document)}
    shown = {name: icon for name, icon in resolved.items() if icon and not icon.get("hidden")}
    still = {k: i for k, i in shown.items() if not any(tag in i["body"] for tag in MOVING)}
    aliases = _unchanged_aliases(document)
    return IconSet(
        prefix=document["prefix"],
        title=info["name"],
        category=info.get("category", ""),
        author=info["author"]["name"],
        license=dict(info["license"]),
        icons=[
            Icon(name, wrap(icon), tuple(categories.get(name, ())), tuple(aliases.get(name, ())))
            for name, icon in sorted(still.items())
        ],
        moving=len(shown) - len(still),
    )


def wrap(icon: dict[str, Any]) -> str:
    """Wrap an icon's inner part in a complete SVG file: square, with the icon's box centred.

    Args:
        icon: `body`, `left`, `top`, `width`, `height`; `hFlip`, `vFlip` and `rotate` (quarter
            turns clockwise) if it is mirrored and then rotated.
    """
    body, width, height = icon["body"], icon["width"], icon["height"]
    box = (icon["left"], icon["top"], width, height)
    turns = icon.get("rotate", 0) % 4
    mirrored = (-1 if icon.get("hFlip") else 1, -1 if icon.get("vFlip") else 1)
    if turns or mirrored != (1, 1):
        middle = (box[0] + width / 2, box[1] + height / 2)
        box = (0, 0, height, width) if turns % 2 else (0, 0, width, height)
        moves = [
            f"translate({_numbers(box[2] / 2, box[3] / 2)})",
            f"rotate({90 * turns})",
            f"scale({_numbers(*mirrored)})",
            f"translate({_numbers(-middle[0], -middle[1])})",
        ]
        body = f'<g transform="{" ".join(moves)}">{body}</g>'
    # Width equal to height: viewers centre a box with another aspect ratio in it.
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        f' width="64" height="64" viewBox="{_numbers(*box)}">{body}</svg>'
    )


def _numbers(*values: float) -> str:
    return " ".join(f"{value:.8g}" for value in values)


def _names(document: dict[str, Any]) -> list[str]:
    aliases = document.get("aliases", {})
    return [*document["icons"], *(name for name, a in aliases.items() if not _is_unchanged(a))]


def _is_unchanged(alias: dict[str, Any]) -> bool:
    return set(alias) <= {"parent", "hidden"}


def _unchanged_aliases(document: dict[str, Any]) -> dict[str, list[str]]:
    aliases = document.get("aliases", {})
    others: dict[str, list[str]] = {}
    for name, alias in aliases.items():
        seen = {name}
        parent = name
        while parent in aliases and _is_unchanged(aliases[parent]):
            parent = aliases[parent]["parent"]
            if parent in seen:
                break
            seen.add(parent)
        if parent != name and not alias.get("hidden"):
            others.setdefault(parent, []).append(name)
    return others


def _resolve(document: dict[str, Any], name: str) -> dict[str, Any] | None:
    """An icon with its box and the changes of its chain of parents; None if that is broken."""
    aliases = document.get("aliases", {})
    chain: list[dict[str, Any]] = []
    while name not in document["icons"]:
        if name not in aliases or len(chain) > len(aliases):
            return None
        chain.append(aliases[name])
        name = aliases[name]["parent"]
    own = {key: document.get(key, default) for key, default in _BOX.items()}
    icon = {**own, **document["icons"][name]}
    for alias in reversed(chain):
        moved = {key: icon.get(key, False) != alias.get(key, False) for key in ("hFlip", "vFlip")}
        icon = {**icon, **alias, **moved, "rotate": icon.get("rotate", 0) + alias.get("rotate", 0)}
    return icon


def _download(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise UsageError(
            f"npm, which fetches {NPM_NAME}, is not installed; pass the package with --package"
        )
    command = [npm, "pack", NPM_NAME, "--ignore-scripts", "--silent", "--pack-destination"]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    files = list(folder.glob("*.tgz"))
    if done.returncode != 0 or len(files) != 1:
        reason = " ".join(done.stderr.split()) or f"npm ended with code {done.returncode}"
        raise UsageError(f"npm could not fetch {NPM_NAME}: {reason[:300]}")
    return files[0]


def _folder_reader(folder: Path) -> Callable[[str], Any]:
    if (folder / "package").is_dir():  # the tarball's layout
        folder = folder / "package"

    def read(name: str) -> Any:
        try:
            return json.loads((folder / name).read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {folder / name}: {error}") from error

    return read


@contextlib.contextmanager
def _tar_reader(path: Path) -> Iterator[Callable[[str], Any]]:
    try:
        tar = tarfile.open(path)  # noqa: SIM115  # closed below
        names = set(tar.getnames())
    except (OSError, tarfile.TarError, EOFError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error, 200)}") from error

    def read(name: str) -> Any:
        if f"package/{name}" not in names:
            raise UsageError(f"{path} is not the npm package {NPM_NAME}: it has no {name}")
        try:
            file = tar.extractfile(f"package/{name}")
            assert file is not None  # only links and folders give None
            return json.loads(file.read())
        except (OSError, tarfile.TarError, EOFError, ValueError) as error:
            raise UsageError(f"cannot read {name} in {path}: {error}") from error

    with tar:
        yield read
