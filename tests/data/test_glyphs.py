from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from webdataset.writer import ShardWriter

from megabatch.data import glyphs as module
from megabatch.data.glyphs import HELD_OUT_FACES, GlyphSet, load_glyphs, write_glyphs
from megabatch.data.images import decoded
from megabatch.data.sources import open_pairs
from megabatch.errors import UsageError

from .samples import captions


def image_of(glyphs: GlyphSet, face: str, character: str) -> np.ndarray:
    is_face = glyphs.faces == glyphs.face_names.index(face)
    (at,) = np.flatnonzero(is_face & (glyphs.characters == ord(character)))
    return glyphs.images[at]


def test_the_fonts_in_matplotlib(glyphs: GlyphSet):
    n = len(glyphs)
    assert n == 45_715
    assert len(glyphs.names) == len(set(glyphs.names)) == 6_494
    assert len(glyphs.face_names) == 14
    assert glyphs.images.shape == (n, 32, 32)
    for at in range(0, n, 997):
        expected = unicodedata.name(chr(glyphs.characters[at])).lower()
        assert glyphs.names[glyphs.name_ids[at]] == expected


def test_nothing_is_cut_off_and_few_are_blank(glyphs: GlyphSet):
    border = np.ones((32, 32), dtype=bool)
    border[1:-1, 1:-1] = False
    assert not glyphs.images[:, border].any()
    blank = ~glyphs.images.any(axis=(1, 2))
    assert blank.sum() == 21
    assert {"braille pattern blank", "object replacement character"} <= {
        glyphs.names[i] for i in glyphs.name_ids[blank]
    }


def test_size_and_height_tell_characters_apart(glyphs: GlyphSet):
    large, small = (image_of(glyphs, "DejaVuSans", c) > 127 for c in "Oo")
    assert large.sum() > 1.2 * small.sum()
    rows = np.arange(32)
    comma, quote = (
        np.average(rows, weights=image_of(glyphs, "DejaVuSans", c).sum(axis=1)) for c in ",'"
    )
    assert comma > quote + 8


def test_splits_are_disjoint(glyphs: GlyphSet):
    parts = {name: glyphs.split(name) for name in ("train", "faces", "characters")}
    assert [len(part) for part in parts.values()] == [36_098, 5_804, 3_097]  # as documented
    assert len(set(parts["train"].name_ids)) == 5_758
    assert parts["faces"][0].key == "DejaVuSerif-Bold_u0021"
    keys = [part[i].key for part in parts.values() for i in range(len(part))]
    assert len(set(keys)) == len(keys)
    held = {glyphs.face_names.index(face) for face in HELD_OUT_FACES}
    assert set(parts["faces"].faces) == held
    assert held.isdisjoint(parts["train"].faces)
    assert held.isdisjoint(parts["characters"].faces)
    assert set(parts["characters"].name_ids).isdisjoint(parts["train"].name_ids)
    assert set(parts["faces"].name_ids) <= set(parts["train"].name_ids)
    assert len(glyphs.split("all")) == len(glyphs)


def test_drawn_again_it_is_the_same(glyphs: GlyphSet):
    fonts = module._font_files()
    few = [path for path in fonts if path.stem in ("DejaVuSansDisplay", "DejaVuSansMono-Oblique")]
    again = module.render(few)
    for face, path in enumerate(few):
        before = glyphs.images[glyphs.faces == glyphs.face_names.index(path.stem)]
        np.testing.assert_array_equal(again.images[again.faces == face], before)


@pytest.fixture
def one_face(monkeypatch: pytest.MonkeyPatch) -> Path:
    (font,) = (path for path in module._font_files() if path.stem == "DejaVuSansDisplay")
    monkeypatch.setattr(module, "_font_files", lambda: [font])
    return font


def test_the_cache_gives_the_same_set(one_face: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "cache"))
    drawn = load_glyphs()
    with monkeypatch.context() as patch:
        patch.setattr(module, "render", lambda fonts: pytest.fail("drawn again"))
        cached = load_glyphs()
    assert cached.names == drawn.names
    assert cached.face_names == drawn.face_names
    for column in ("images", "name_ids", "faces", "characters"):
        np.testing.assert_array_equal(getattr(cached, column), getattr(drawn, column))
        assert getattr(cached, column).dtype == getattr(drawn, column).dtype
    changed = tmp_path / one_face.name  # other fonts have another cache
    changed.write_bytes(one_face.read_bytes() + b"\0")
    monkeypatch.setattr(module, "_font_files", lambda: [changed])
    load_glyphs()
    assert len(list((tmp_path / "cache").rglob("*.npz"))) == 2


def test_matplotlib_without_fonts(monkeypatch, tmp_path: Path):
    import matplotlib

    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    with pytest.raises(UsageError, match="no DejaVu"):
        load_glyphs()


@pytest.fixture
def few(glyphs: GlyphSet) -> GlyphSet:
    part = glyphs.split("train")
    return part.take(np.arange(0, len(part), 97))


def test_round_trip(few: GlyphSet, tmp_path: Path):
    shards = write_glyphs(few, tmp_path / "new" / "shards", samples_per_shard=150)
    assert [path.name for path in shards] == ["00000.tar", "00001.tar", "00002.tar"]
    again = write_glyphs(few, tmp_path / "again", samples_per_shard=150)
    assert [path.read_bytes() for path in shards] == [path.read_bytes() for path in again]
    pairs = open_pairs(str(tmp_path / "new" / "shards"))
    assert captions(pairs) == few.texts(range(373))
    for i in range(len(few)):
        assert pairs[i].key.partition(":")[2] == few[i].key
        np.testing.assert_array_equal(np.asarray(decoded(pairs[i].image)), np.asarray(few[i].image))


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_nothing(few: GlyphSet, tmp_path: Path, monkeypatch, failure):
    write = ShardWriter.write

    def fail_in_the_second_shard(writer, sample):
        write(writer, sample)
        if writer.total == 150:
            raise failure

    monkeypatch.setattr(ShardWriter, "write", fail_in_the_second_shard)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else UsageError
    with pytest.raises(expected):
        write_glyphs(few, tmp_path / "shards", samples_per_shard=100)
    assert list(tmp_path.iterdir()) == []
