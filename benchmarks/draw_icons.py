"""The icons of the npm package @iconify/json as a data set of grey pixels: train/ and test/.

    python benchmarks/draw_icons.py --output icons --workers 16
    cd benchmarks; megabatch train --config icons.toml --trust --train-data ../icons/train
    megabatch eval runs/icons --trust --val-data ../icons/test

Each set belongs to one split as a whole. icons/sets.json has each set's author and licence: there
are many, and some require attribution. benchmarks/README.md describes the data set.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from machinery.icon_set import write_icons
from machinery.iconify import open_package


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--package", type=Path,
                        help="its tarball or unpacked folder; default: npm fetches it")  # fmt: skip
    parser.add_argument("--size", type=int, default=64, help="pixels per side")
    parser.add_argument("--workers", type=int, default=0, help="processes that rasterise")
    options = parser.parse_args()
    with open_package(options.package) as package:
        done = write_icons(package, options.output, size=options.size, workers=options.workers)
    print(f"@iconify/json {done.version}: {options.output}")
    for split, captions in done.captions.items():
        counts = f"{done.icons[split]:,} icons of {done.sets[split]:,} sets"
        print(f"{split}: {counts}, {len(captions):,} distinct captions")
    for reason, count in (+done.left_out).most_common():
        print(f"left out {count:,} x {reason}")


if __name__ == "__main__":
    main()
