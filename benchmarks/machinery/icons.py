"""Icons of the npm package @iconify/json as WebDataset shards of grey pixels with captions.

The package has a JSON file for each set, in the IconifyJSON format: the inner part of each icon's
SVG, defaults for its box, aliases, categories, the author and the licence.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import tarfile
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import resvg_py
from PIL import Image
from webdataset.writer import ShardWriter

from megabatch.data.pairs import caption_id
from megabatch.files import new_folder

HELD_OUT_PER_MILLE = 80  # of the families; 2.8% of the icons

_BOX = {"left": 0, "top": 0, "width": 16, "height": 16}  # IconifyJSON's own defaults
#: Tags of animated icons, and parts that would make a drawing depend on more than the icon.
_MOVING = ("<animate", "<set ")
_FOREIGN = ("<image", "<feImage", "<!ENTITY")
# Categories of whole sets that describe what icons show, and so belong into captions. The others
# describe grids ("UI 24px") and maintenance.
_SUBJECTS = ("Emoji", "Flags / Maps", "Logos", "Programming")


@dataclass(frozen=True)
class Icon:
    """An icon: its name in the set, an SVG file, and the set's categories for it."""

    name: str
    svg: str
    categories: tuple[str, ...]


@dataclass
class Written:
    """Counts by split: icons, sets, distinct captions; icons left out, by reason."""

    version: str
    icons: Counter[str] = field(default_factory=Counter)
    sets: Counter[str] = field(default_factory=Counter)
    captions: dict[str, set[int]] = field(default_factory=lambda: {"train": set(), "test": set()})
    left_out: Counter[str] = field(default_factory=Counter)


def write_icons(package: Path, output: Path, *, size: int = 64, workers: int = 0) -> Written:
    """Write the shards `output/train/*.tar` and `output/test/*.tar`, and `output/sets.json`.

    Icons are sorted by set and name. sets.json has the package's
    version and, for each set, what it says of itself (author and licence among it), split and
    number of icons. The same package gives the same bytes. The folder appears at once when
    everything is written.

    Args:
        package: npm's tarball.
        output: new or empty folder.
        size: pixels per side.
        workers: processes that rasterise; 0: this one does. Threads would not help: resvg_py holds
            the GIL while it draws.
    """
    with contextlib.ExitStack() as stack:
        tar = stack.enter_context(tarfile.open(package))
        done = Written(_read(tar, "package.json")["version"])
        sets: dict[str, dict[str, Any]] = {}
        waiting: deque[tuple[Icon, dict[str, Any]]] = deque()

        def tasks() -> Iterator[tuple[str, int]]:
            for prefix in sorted(_read(tar, "collections.json")):  # a pool reads them in a thread
                document = _read(tar, f"json/{prefix}.json")
                split = "test" if is_held_out(prefix) else "train"
                sets[prefix] = {"prefix": prefix, **document["info"], "split": split, "icons": 0}
                for icon in icons_of(document):
                    waiting.append((icon, sets[prefix]))
                    yield icon.svg, size

        folder = stack.enter_context(new_folder(output))
        writers = {
            split: stack.enter_context(contextlib.closing(shard_writer(folder / split)))
            for split in done.captions
        }
        pool = stack.enter_context(get_context("spawn").Pool(workers)) if workers else None
        for pixels in pool.imap(_drawn, tasks(), 256) if pool else map(_drawn, tasks()):
            icon, of = waiting.popleft()
            if isinstance(pixels, str):
                done.left_out[pixels] += 1
                continue
            split, text = of["split"], caption(icon, of.get("category", ""))
            key = f"{of['prefix']}_{icon.name}".replace(".", "-")
            writers[split].write(sample(key, pixels, size, text))
            done.captions[split].add(caption_id(text))
            done.icons[split] += 1
            done.sets[split] += of["icons"] == 0
            of["icons"] += 1
        document = {"package": f"@iconify/json {done.version}", "sets": list(sets.values())}
        (folder / "sets.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    return done


def shard_writer(folder: Path) -> ShardWriter:
    """A writer of a new folder's shards."""
    folder.mkdir()
    options = {"encoder": False, "mtime": 0, "verbose": 0}
    return ShardWriter(f"{folder}/%05d.tar", 20_000, math.inf, **options)


def sample(key: str, pixels: bytes, size: int, caption: str) -> dict[str, Any]:
    """A shard's sample of size * size grey pixels, in the format PPM: it decodes fastest."""
    image = f"P5 {size} {size} 255\n".encode() + pixels
    return {"__key__": key, "ppm": image, "txt": caption.encode()}


def _read(tar: tarfile.TarFile, name: str) -> Any:
    file = tar.extractfile(f"package/{name}")
    assert file is not None  # only links and folders give None
    return json.loads(file.read())


def is_held_out(prefix: str) -> bool:
    """Whether a set belongs to the test split.

    A hash of its family's name decides: the prefix's first word without trailing digits, since the
    sets of one family (fa, fa6-solid; fluent, fluent-color) have similar icons for the same things.
    """
    family = prefix.split("-")[0].rstrip("0123456789")
    digest = hashlib.sha256(family.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def caption(icon: Icon, category: str) -> str:
    """Describe what an icon shows, in lower case, the most specific part first.

    The parts are its name with spaces for hyphens (so that words such as "outline" or "filled"
    stay), the set's categories for it, and the subject of the whole set, if its category is one.
    """
    parts = [icon.name.replace("-", " "), *icon.categories]
    parts += category.split(" / ") if category in _SUBJECTS else []
    # A set in several categories may repeat itself, and a name may be its category.
    return ", ".join(dict.fromkeys(" ".join(part.lower().split()) for part in parts))


# --- a set's icons --------------------------------------------------------------------------------


def icons_of(document: dict[str, Any]) -> list[Icon]:
    """The icons of an IconifyJSON document, by name.

    Hidden ones (withdrawn, kept for old pages) and animated ones are left out, and so are aliases,
    but for those that rotate or mirror another icon.
    """
    categories: dict[str, list[str]] = {}
    for category, names in document.get("categories", {}).items():
        for name in names:
            categories.setdefault(name, []).append(category)
    aliases = document.get("aliases", {})
    changed = [name for name, alias in aliases.items() if set(alias) - {"parent", "hidden"}]
    found = {name: _resolve(document, name) for name in sorted([*document["icons"], *changed])}
    return [
        Icon(name, wrap(icon), tuple(categories.get(name, ())))
        for name, icon in found.items()
        if icon and not icon.get("hidden") and not any(tag in icon["body"] for tag in _MOVING)
    ]


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


def _drawn(task: tuple[str, int]) -> bytes | str:
    """Grey pixels of an SVG on white, or the reason why there are none; `currentColor` is black.

    Texts are left out, since fonts differ between machines.
    """
    svg, size = task
    if any(tag in svg for tag in _FOREIGN):
        return "with an image or entities"
    try:
        png = resvg_py.svg_to_bytes(
            svg_string=svg, width=size, height=size, background="white", skip_system_fonts=True
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic in Rust is no Exception
        return "undecodable"
    return Image.open(io.BytesIO(png)).convert("RGB").convert("L").tobytes()
