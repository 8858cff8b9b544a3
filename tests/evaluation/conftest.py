"""A glyph set small enough to evaluate in a second, and run folders with it."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megabatch.cli import main
from megabatch.data.glyphs import GlyphSet, load_glyphs
from megabatch.models import create


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    return write_untrained(tmp_path)


def write_untrained(parent: Path) -> Path:
    folder = parent / "a <b> run"
    folder.mkdir()
    (folder / "config.toml").write_text('model = "glyph-small"\ntrain_data = "glyphs"\n')
    torch.manual_seed(0)
    save_file(create("glyph-small").module.state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def glyphs_evaluated_once(
    tmp_path_factory: pytest.TempPathFactory, small_glyphs: GlyphSet
) -> tuple[Path, str]:
    """An untrained run with a log of 12 steps, evaluated by the command, and what that printed."""
    folder = write_untrained(tmp_path_factory.mktemp("evaluated-glyphs"))
    lines = [
        {"step": s, "epoch": s / 9, "samples": s * 64, "loss": 6 / s, "lr": 1e-3, "seconds": s / 2}
        for s in range(1, 13)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr("megabatch.evaluation.run.load_glyphs", lambda: small_glyphs)
        assert main(["eval", str(folder), "--batch-size", "256"]) == 0
    torch.set_num_threads(threads)
    return folder, out.getvalue()


@pytest.fixture
def evaluated_glyphs(tmp_path: Path, glyphs_evaluated_once: tuple[Path, str]) -> Path:
    """A copy of that run's folder."""
    folder, _ = glyphs_evaluated_once
    return shutil.copytree(folder, tmp_path / folder.name)
