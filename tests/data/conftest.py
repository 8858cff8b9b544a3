from __future__ import annotations

import pytest
import torch

from megabatch.data.glyphs import GlyphSet, load_glyphs


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataLoader waits this long, not 5 s, for a hanging worker to end before it kills it."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


@pytest.fixture(scope="session")
def glyphs() -> GlyphSet:
    return load_glyphs()
