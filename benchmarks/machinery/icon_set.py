"""Icons of the npm package @iconify/json as grey pixels with captions."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from machinery.grey import GreyWriter
from machinery.iconify import Icon, IconSet, Package
from machinery.svg import BadSvg, draw_svg
from megabatch.data.pairs import caption_id
from megabatch.errors import UsageError
from megabatch.files import new_folder

HELD_OUT_PER_MILLE = 80  # of the families; 2.8% of the icons

# Categories of whole sets that describe what icons show, and so belong into captions. The others
# describe grids ("UI 24px") and maintenance.
_SUBJECTS = ("Emoji", "Flags / Maps", "Logos", "Programming")


@dataclass
class Written:
    """Counts by split: icons, sets, distinct captions; icons left out, by reason."""

    version: str
    icons: Counter[str] = field(default_factory=Counter)
    sets: Counter[str] = field(default_factory=Counter)
    captions: dict[str, set[int]] = field(default_factory=lambda: {"train": set(), "test": set()})
    left_out: Counter[str] = field(default_factory=Counter)


def is_held_out(prefix: str) -> bool:
    """Whether a set belongs to the test split.

    A hash of its family's name decides: the prefix's first word without trailing digits, since the
    sets of one family (fa, fa6-solid; fluent, fluent-color) have similar icons for the same things.
    """
    family = prefix.split("-")[0].rstrip("0123456789")
    digest = hashlib.sha256(family.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def caption(icon: Icon, of: IconSet) -> str:
    """Describe what an icon shows, in lower case, the most specific part first.

    The parts are its name with spaces for hyphens (so that words such as "outline" or "filled"
    stay), the set's categories for it, and the subject of the whole set.
    """
    parts = [icon.name.replace("-", " "), *icon.categories]
    parts += of.category.split(" / ") if of.category in _SUBJECTS else []
    # A set in several categories may repeat itself, and a name may be its category.
    return ", ".join(dict.fromkeys(" ".join(part.lower().split()) for part in parts))


def write_icons(package: Package, output: Path, *, size: int = 64, workers: int = 0) -> Written:
    """Write the folders `output/train` and `output/test` (see GreyWriter), and `output/sets.json`.

    Icons are sorted by set and name; an icon's id is its caption's. sets.json has the package's
    version and, for each set, title, author, licence, category, split and number of icons. The same
    package gives the same bytes. The folder appears at once when everything is written.

    Args:
        package: an opened package.
        output: new or empty folder.
        size: pixels per side.
        workers: processes that rasterise; 0: this one does. Threads would not help: resvg_py holds
            the GIL while it draws.

    Raises:
        UsageError: the folder is not empty or cannot be written, the package cannot be read.
    """
    done = Written(package.version)
    sets: dict[str, dict[str, Any]] = {}
    waiting: deque[tuple[Icon, IconSet]] = deque()

    def tasks() -> Iterator[tuple[str, int]]:
        for icon_set in package.sets():  # a pool reads them in a thread of its own
            sets[icon_set.prefix] = _set_fields(icon_set)
            done.left_out["moving"] += icon_set.moving
            for icon in icon_set.icons:
                waiting.append((icon, icon_set))
                yield icon.svg, size

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(new_folder(output))
        writers = {
            split: stack.enter_context(contextlib.closing(GreyWriter(folder / split, size)))
            for split in done.captions
        }
        pool = stack.enter_context(get_context("spawn").Pool(workers)) if workers else None
        for drawn in pool.imap(_drawn, tasks(), 256) if pool else map(_drawn, tasks()):
            icon, icon_set = waiting.popleft()
            if isinstance(drawn, str):
                done.left_out[drawn] += 1
                continue
            fields, text = sets[icon_set.prefix], caption(icon, icon_set)
            split, number = fields["split"], caption_id(text)
            key = f"{icon_set.prefix}_{icon.name}".replace(".", "-")
            writers[split].write(drawn, key=key, number=number, caption=text)
            done.captions[split].add(number)
            done.icons[split] += 1
            done.sets[split] += fields["icons"] == 0
            fields["icons"] += 1
        if not done.icons:
            raise UsageError("the package has no icon that can be used")
        document = {"package": f"@iconify/json {package.version}", "sets": list(sets.values())}
        (folder / "sets.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    return done


def _set_fields(of: IconSet) -> dict[str, Any]:
    return {
        "prefix": of.prefix,
        "title": of.title,
        "author": of.author,
        "license": of.license,
        "category": of.category,
        "split": "test" if is_held_out(of.prefix) else "train",
        "icons": 0,
    }


def _drawn(task: tuple[str, int]) -> bytes | str:
    """Return grey pixels, or the reason why there are none."""
    svg, size = task
    try:
        return draw_svg(svg.encode(), size).convert("L").tobytes()
    except BadSvg as error:
        return str(error)
