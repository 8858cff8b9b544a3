"""Icons with captions, written as WebDataset shards: a data set for large batches."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from megabatch.data.export import ShardWriter
from megabatch.data.grey import GreyWriter
from megabatch.data.iconify import Icon, IconSet, Package
from megabatch.data.pairs import caption_id
from megabatch.data.svg import BadSvg, draw_svg
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


def caption(icon: Icon, of: IconSet, *, set_title: bool = False) -> str:
    """Describe what an icon shows, in lower case, the most specific part first.

    The parts are its name with spaces for hyphens (so that words such as "outline" or "filled"
    stay), the set's categories for it, the subject of the whole set, and, if requested, the set's
    title.
    """
    parts = [icon.name.replace("-", " "), *icon.categories]
    parts += of.category.split(" / ") if of.category in _SUBJECTS else []
    parts += [of.title] if set_title else []
    # A set in several categories may repeat itself, and a name may be its category.
    return ", ".join(dict.fromkeys(" ".join(part.lower().split()) for part in parts))


def write_icons(
    package: Package,
    output: str | Path,
    *,
    kind: Literal["svg", "png", "grey"] = "svg",
    size: int = 64,
    set_title: bool = False,
    max_bytes: int | None = None,
    samples_per_shard: int = 10_000,
    workers: int = 0,
) -> Written:
    """Write `output/train/00000.tar`, ..., `output/test/00000.tar`, ..., and `output/sets.json`.

    A sample is `svg` or `png`, `txt` (the caption) and `json`: caption, key, caption_id (equal
    for equal captions), set, set_title, categories, license (SPDX identifier, else title) and
    aliases. Samples are sorted by set and name. With kind "grey" there are no shards: each split is
    a folder of `megabatch.data.grey`. sets.json has the package's version and, for each set, title,
    author, licence, category, split and number of icons. The same package gives the same bytes. The
    folder appears at once when everything is written.

    Args:
        package: an opened package.
        output: new or empty folder.
        kind: the icons' format: SVG, or rasterised to `size` pixels per side as PNG or as grey
            pixels.
        size: of png and grey.
        set_title: whether captions end with the set's title.
        max_bytes: leave out icons whose SVG is longer.
        samples_per_shard: in all shards but the last of each split.
        workers: processes that rasterise; 0: this one does.

    Raises:
        UsageError: the folder is not empty or cannot be written, the package cannot be read.
    """
    done = Written(package.version)
    sets: dict[str, dict[str, Any]] = {}

    def samples() -> Iterator[dict[str, Any]]:
        for icon_set in package.sets():
            sets[icon_set.prefix] = {**_set_fields(icon_set), "icons": 0}
            yield from _samples(icon_set, set_title, max_bytes, done.left_out)

    with new_folder(Path(output)) as folder, _Rasteriser(kind, size, workers) as draw:
        with ExitStack() as stack:
            writers: dict[str, _ShardSplit | _GreySplit] = {}
            for split in done.captions:
                own = folder / split
                writer = (
                    _GreySplit(own, size) if kind == "grey" else _ShardSplit(own, samples_per_shard)
                )
                writers[split] = stack.enter_context(closing(writer))
            for sample in draw(samples(), done.left_out):
                own_set = sets[sample["json"]["set"]]
                split = own_set["split"]
                writers[split].write(sample)
                done.captions[split].add(sample["json"]["caption_id"])
                done.icons[split] += 1
                done.sets[split] += own_set["icons"] == 0
                own_set["icons"] += 1
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
    }


def _samples(
    of: IconSet, set_title: bool, max_bytes: int | None, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    left_out["moving"] += of.moving
    for icon in of.icons:
        if max_bytes is not None and len(icon.svg.encode()) > max_bytes:
            left_out[f"longer than {max_bytes} bytes"] += 1
            continue
        text = caption(icon, of, set_title=set_title)
        key = f"{of.prefix}_{icon.name}".replace(".", "-")  # a dot would end the sample's name
        fields = {
            "caption": text,
            "key": key,
            "caption_id": caption_id(text),
            "set": of.prefix,
            "set_title": of.title,
            "categories": icon.categories,
            "license": of.license.get("spdx") or of.license["title"],
            "aliases": icon.aliases,
        }
        yield {"__key__": key, "svg": icon.svg.encode(), "txt": text.encode(), "json": fields}


class _ShardSplit(ShardWriter):
    """A split's folder of shards."""

    def __init__(self, folder: Path, samples_per_shard: int) -> None:
        folder.mkdir()
        super().__init__(folder, samples_per_shard)

    def write(self, sample: dict[str, Any]) -> None:
        document = json.dumps(sample["json"], ensure_ascii=False, separators=(",", ":"))
        super().write({**sample, "json": document.encode()})


class _GreySplit:
    """A split's folder of grey images."""

    def __init__(self, folder: Path, size: int) -> None:
        self._writer = GreyWriter(folder, size)

    def write(self, sample: dict[str, Any]) -> None:
        fields = sample["json"]
        self._writer.write(
            sample["grey"],
            key=fields["key"],
            number=fields["caption_id"],
            caption=fields["caption"],
        )

    def close(self) -> None:
        self._writer.close()


class _Rasteriser:
    """Its context is a function that replaces samples' svg by pixels, in this process or several.

    resvg_py holds the GIL while it draws, so threads would not help.
    """

    def __init__(self, kind: str, size: int, workers: int) -> None:
        self.kind = kind
        self.size = size
        in_pool = workers and kind != "svg"
        self._pool = get_context("spawn").Pool(workers) if in_pool else None

    def __enter__(self) -> Callable[..., Iterable[dict[str, Any]]]:
        return self._unchanged if self.kind == "svg" else self._draw

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    def _unchanged(
        self, samples: Iterable[dict[str, Any]], left_out: Counter[str]
    ) -> Iterable[dict[str, Any]]:
        return samples

    def _draw(
        self, samples: Iterable[dict[str, Any]], left_out: Counter[str]
    ) -> Iterator[dict[str, Any]]:
        waiting: deque[dict[str, Any]] = deque()

        def tasks() -> Iterator[tuple[bytes, str, int]]:
            for sample in samples:  # a pool reads them in a thread of its own
                svg = sample.pop("svg")
                waiting.append(sample)
                yield svg, self.kind, self.size

        run = map(_drawn, tasks()) if self._pool is None else self._pool.imap(_drawn, tasks(), 256)
        for drawn in run:
            sample = waiting.popleft()
            if isinstance(drawn, str):
                left_out[drawn] += 1
            else:
                yield {**sample, self.kind: drawn}


def _drawn(task: tuple[bytes, str, int]) -> bytes | str:
    """Return a PNG or grey pixels, or the reason why there are none."""
    svg, kind, size = task
    try:
        image = draw_svg(svg, size)
    except BadSvg as error:
        return str(error)
    if kind == "grey":
        return image.convert("L").tobytes()
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()
