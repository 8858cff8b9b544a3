"""A smaller package of the icons, for a machine that cannot download the whole one.

    python benchmarks/icons_package.py iconify-json-2.2.535.tgz icons.tar.xz --max-bytes 2048

It contains everything that `draw_icons.py --package icons.tar.xz` reads: the package's sets without
hidden and animated icons and without metadata that captions do not use, and, for training
sets, without icons whose drawing exceeds --max-bytes. The held-out sets are complete, so that
recalls are comparable.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machinery.icon_set import is_held_out
from machinery.iconify import MOVING, Package, open_package

_KEPT = ("prefix", "info", "left", "top", "width", "height")


def smaller(document: dict[str, Any], max_bytes: int | None) -> dict[str, Any]:
    """A set with those of its icons that stay; max_bytes: of a drawing, None: any length."""
    icons = {name: i for name, i in document["icons"].items() if _stays(i, max_bytes)}
    names, aliases = set(icons), document.get("aliases", {})
    more = True
    while more:  # an alias may stand for an alias
        found = {n for n, a in aliases.items() if n not in names and _leads_to(a, names)}
        names |= found
        more = bool(found)
    categories = {
        category: kept
        for category, members in document.get("categories", {}).items()
        if (kept := [name for name in members if name in names])
    }
    return {
        **{key: document[key] for key in _KEPT if key in document},
        "icons": icons,
        "aliases": {name: alias for name, alias in aliases.items() if name in names},
        "categories": categories,
    }


def _stays(icon: dict[str, Any], max_bytes: int | None) -> bool:
    body = icon["body"]
    if icon.get("hidden") or any(tag in body for tag in MOVING):
        return False
    return max_bytes is None or len(body.encode()) <= max_bytes


def _leads_to(alias: dict[str, Any], names: set[str]) -> bool:
    return alias["parent"] in names and not alias.get("hidden")


def files(package: Package, max_bytes: int | None) -> Iterator[tuple[str, Any]]:
    """Names and contents, in the order in which they are read again."""
    yield "package.json", {"name": "@iconify/json", "version": package.version}
    yield "collections.json", dict.fromkeys(package.prefixes)
    for prefix in package.prefixes:
        limit = None if is_held_out(prefix) else max_bytes
        yield f"json/{prefix}.json", smaller(package.read(f"json/{prefix}.json"), limit)


def write(package: Package, output: Path, max_bytes: int | None, preset: int) -> int:
    """Write the archive; returns how many icons are in it."""
    # Paths are text: the last byte's high bits tell the next one, its place in a word does not.
    coder = {"id": lzma.FILTER_LZMA2, "preset": preset, "lc": 4, "lp": 0, "pb": 0}
    count = 0
    with (
        lzma.open(output, "wb", filters=[coder]) as file,
        tarfile.open(fileobj=file, mode="w") as tar,
    ):
        for name, document in files(package, max_bytes):
            count += len(document.get("icons", ()))
            data = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path, help="the package's tarball or unpacked folder")
    parser.add_argument("output", type=Path, help="a .tar.xz")
    parser.add_argument("--max-bytes", type=int)
    parser.add_argument("--preset", type=int, default=9, help="xz's, 0 to 9")
    options = parser.parse_args()
    start = time.perf_counter()
    with open_package(options.package) as package:
        count = write(package, options.output, options.max_bytes, options.preset)
    size, seconds = options.output.stat().st_size, time.perf_counter() - start
    print(f"{count:,} icons, {size:,} bytes ({size / 2**20:.1f} MiB), in {seconds:.0f} s")


if __name__ == "__main__":
    main()
