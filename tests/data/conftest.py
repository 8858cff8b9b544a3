"""A cache folder of the tests' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megabatch.data.glyphs import GlyphSet, load_glyphs


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGABATCH_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def glyphs(cache: Path) -> GlyphSet:
    return load_glyphs()
