"""benchmarks/study_package.py: a package gives the same study as the data that it is made of."""

from __future__ import annotations

import tarfile
from pathlib import Path

import torch

from machinery.study_data import load
from tests.benchmarks.study_files import write_icons, write_wordnet
from tests.benchmarks.test_scripts import run


def test_a_package_has_the_same_pairs(tmp_path: Path) -> None:
    icons, wordnet = write_icons(tmp_path / "icons"), write_wordnet(tmp_path / "words")
    package, there = tmp_path / "study.tar.xz", tmp_path / "there"
    run("study_package.py", str(icons), str(wordnet), str(package), "--preset=0")
    with tarfile.open(package) as tar:
        tar.extractall(there, filter="data")
    for name, before in (("icons", icons), ("wordnet", wordnet)):
        expected = load(name, before, torch.device("cpu"))
        found = load(name, there / name, torch.device("cpu"))
        for mine, right in (
            (found.train, expected.train),
            *((found.tests[test], expected.tests[test]) for test in expected.tests),
        ):
            assert torch.equal(mine.texts, right.texts)
            same = right.ids[:, None] == right.ids
            assert torch.equal(mine.ids[:, None] == mine.ids, same)
            difference = mine.first.int() - right.first.int()
            assert difference.abs().max() < (16 if name == "icons" else 1)
