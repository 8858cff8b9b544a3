r"""Text pairs from Debian's packages, as one file of tokens that numpy alone reads.

    mkdir -p debian/lists/partial && cd debian && lists="-o Dir::State::lists=$PWD/lists"
    apt-get $lists -o Acquire::Languages=en -o Acquire::GzipIndexes=false update
    for language in bul ces deu ell fin fra hun ind ita jpn nld nor pol por rus spa swe tur; do
        apt-get $lists download dict-freedict-eng-$language
    done
    apt-get $lists download wordnet-base manpages manpages-dev freebsd-manpages perl-doc \
        erlang-manpages libssl-doc libcurl4-doc tcl8.6-doc tk8.6-doc git-man ncurses-doc \
        libx11-doc libxt-doc postgresql-doc-15 mpich-doc openmpi-doc allegro4-doc netpbm systemd \
        util-linux coreutils lvm2 bind9 samba bsdgames libsystemd-dev libibverbs-dev \
        librdmacm-dev libfabric-dev libmoose-perl libmojolicious-perl        # Debian 12; 95 MB
    for package in *.deb; do dpkg -x $package files; done
    python benchmarks/draw_texts.py debian/files debian/lists --output texts.npz

machinery/text_pairs.py says what pairs there are, and how they are divided. Licences: WordNet's own
(free, with notice); the dictionaries GPL-2+ or GPL-3+ (deu, pol), hun GPL-2, and those from
Wiktionary (bul, fin, ind, jpn, nor) CC-BY-SA-3.0; descriptions and manual pages those of their
packages, all free by Debian's guidelines: files/usr/share/doc/*/copyright names each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from machinery.text_pairs import SOURCES, SPLITS, make_texts, read_pairs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, help="folder of unpacked packages")
    parser.add_argument("lists", type=Path, help="apt's folder of lists")
    parser.add_argument("--output", type=Path, required=True, help="an .npz file")
    options = parser.parse_args()
    texts = make_texts(read_pairs(options.files, options.lists))
    with options.output.open("wb") as file:
        np.savez_compressed(file, **texts._asdict())
    print("|source|split|pairs|queries|documents|tokens a query|tokens a document|")
    print("|---|---|---|---|---|---|---|")
    for source, split in np.ndindex(len(SOURCES), len(SPLITS)):
        chosen = (texts.source == source) & (texts.split == split)
        if chosen.any():
            sides = [texts.query[chosen], texts.document[chosen]]
            distinct = "|".join(f"{len(np.unique(side)):,}" for side in sides)
            tables = [texts.queries, texts.documents]
            means = [np.mean(np.count_nonzero(table[side], axis=1))
                     for table, side in zip(tables, sides, strict=True)]  # fmt: skip
            cells = f"{chosen.sum():,}|{distinct}|{means[0]:.1f}|{means[1]:.1f}"
            print(f"|{SOURCES[source]}|{SPLITS[split]}|{cells}|")


if __name__ == "__main__":
    main()
