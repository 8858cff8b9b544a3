"""A glyph set small enough to evaluate in a second, and run folders with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megabatch.data.glyphs import GlyphSet, load_glyphs
from tests.evaluation.material import untrained_run
from tests.process_state import one_thread

__all__ = ["one_thread"]


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations write no report: its charts take most of a small one's time."""
    monkeypatch.setattr("megabatch.evaluation.run.write_report", lambda *_: None)


@pytest.fixture(scope="session")
def small_glyphs() -> GlyphSet:
    """ASCII and Latin-1 in every face: some 180 names, in all splits of the real set."""
    glyphs = load_glyphs()
    chosen = np.flatnonzero(glyphs.characters < 0x100)
    old_ids, name_ids = np.unique(glyphs.name_ids[chosen], return_inverse=True)
    return GlyphSet(
        images=glyphs.images[chosen],
        name_ids=name_ids.astype(np.int64),
        faces=glyphs.faces[chosen],
        characters=glyphs.characters[chosen],
        names=[glyphs.names[i] for i in old_ids],
        face_names=glyphs.face_names,
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_glyphs: GlyphSet) -> Path:
    """The folder of an untrained run, evaluated on the small glyph set."""
    monkeypatch.setattr("megabatch.evaluation.run.load_glyphs", lambda: small_glyphs)
    return untrained_run(tmp_path / "a <b> run")
