"""The icons of the npm package @iconify/json as a data set of grey pixels: train/ and test/.

    npm pack @iconify/json@2.2.535 --ignore-scripts            # 104 MB
    python benchmarks/draw_icons.py iconify-json-2.2.535.tgz --output icons --workers 16
    cd benchmarks; megabatch train --config icons.toml --trust --train-data ../icons/train
    megabatch eval runs/icons --trust --val-data ../icons/test

Each set belongs to one split as a whole. icons/sets.json has each set's author and licence: there
are many, and some require attribution. benchmarks/README.md describes the data set.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from machinery.icons import write_icons


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path, help="npm's tarball")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--size", type=int, default=64, help="pixels per side")
    parser.add_argument("--workers", type=int, default=0, help="processes that rasterise")
    options = parser.parse_args()
    done = write_icons(options.package, options.output, size=options.size, workers=options.workers)
    print(f"@iconify/json {done.version}: {options.output}")
    for split, captions in done.captions.items():
        counts = f"{done.icons[split]:,} icons of {done.sets[split]:,} sets"
        print(f"{split}: {counts}, {len(captions):,} distinct captions")
    for reason, count in done.left_out.most_common():
        print(f"left out {count:,} x {reason}")


if __name__ == "__main__":
    main()
