from __future__ import annotations

import pytest

from megabatch.data.glyphs import GlyphSet, load_glyphs


@pytest.fixture(scope="session")
def glyphs() -> GlyphSet:
    return load_glyphs()
