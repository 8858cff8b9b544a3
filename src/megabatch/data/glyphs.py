"""The built-in glyph set: images of characters with their Unicode names.

Every letter, number, punctuation mark and symbol (Unicode general categories L, N, P, S) that one
of the 14 DejaVu faces inside matplotlib can draw: 45,715 images of 6,494 names. 21 of the images
are blank in the font itself. The same name recurs in up to 14 faces, which makes real false
negatives, and 13% of a face's characters look exactly like another one of that face (Latin A, Greek
Alpha).
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import PIL
from PIL import Image, ImageDraw, ImageFont, features
from webdataset.writer import ShardWriter

from megabatch.data.cache import cached_arrays
from megabatch.data.pairs import Pair
from megabatch.errors import UsageError
from megabatch.files import new_folder

SIZE = 32  # pixels per side
EM = 24  # font size in pixels: 19 glyphs of 20 fit without shrinking
BASELINE = 24  # pixel row that letters stand on: room for accents above and descenders below
MARGIN = 1  # pixels around the ink that stay empty

# No other face is both bold and serif, so few of these images also occur in training: 12% to the
# pixel (symbols that two faces share), against 20-40% for most other pairs of faces.
HELD_OUT_FACES = ("DejaVuSerif-Bold", "DejaVuSerif-BoldItalic")
HELD_OUT_PERCENT = 8  # of the names
Split = Literal["train", "faces", "characters", "all"]

_RENDERING_VERSION = 1  # increase it when the same fonts would give other arrays


@dataclass(frozen=True)
class GlyphSet:
    """Glyph images with their names, as a data set of pairs.

    images: uint8 (n, 32, 32), white ink on black; name_ids: int64 (n,), index into `names`, the
    same in every split; faces: int64 (n,), index into `face_names`; characters: int64 (n,), code
    points; names: the distinct names of the whole set, lower case, in code point order.
    """

    images: np.ndarray
    name_ids: np.ndarray
    faces: np.ndarray
    characters: np.ndarray
    names: list[str]
    face_names: list[str]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Pair:
        face, code = self.face_names[self.faces[index]], self.characters[index]
        name = self.names[self.name_ids[index]]
        return Pair(Image.fromarray(self.images[index]), name, f"{face}_u{code:04x}")

    def arrays(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return images, uint8 (b, 1, 32, 32), of many samples at once."""
        return self.images[np.asarray(indices), None]

    def texts(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Return their captions."""
        return [self.names[i] for i in self.name_ids[np.asarray(indices)]]

    def take(self, rows: np.ndarray | slice) -> GlyphSet:
        """Return some of the images, by index or by mask."""
        columns = ("images", "name_ids", "faces", "characters")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def split(self, name: Split) -> GlyphSet:
        """Return one part of the set.

        "train": names that are not held out, in the other faces: 36,098 images of 5,758 names.
        "faces": the held-out faces' images of these names: 5,804 of 2,902.
        "characters": images of held-out names, in the other faces: 3,097 of 504.
        "all": everything, which is more than the other parts together.
        """
        held_faces = [i for i, face in enumerate(self.face_names) if face in HELD_OUT_FACES]
        new_face = np.isin(self.faces, held_faces)
        new_name = np.array([is_held_out(n) for n in self.names], dtype=bool)[self.name_ids]
        train = ~new_face & ~new_name
        rows = {
            "train": train,
            "faces": new_face & np.isin(self.name_ids, self.name_ids[train]),
            "characters": new_name & ~new_face,
            "all": slice(None),
        }
        return self.take(rows[name])


def is_held_out(name: str) -> bool:
    """Whether a character is held out: 8 names of 100, picked by a hash of the name alone."""
    # A hash, not a random draw: a new character in a font does not change the others' split.
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def load_glyphs() -> GlyphSet:
    """Return the glyph set, rendered on first use (about two seconds) and cached.

    Raises:
        UsageError: matplotlib is installed without its fonts.
    """
    fonts = _font_files()
    drawn_by = PIL.__version__, features.version("freetype2"), unicodedata.unidata_version
    files = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in fonts]
    identity = (_RENDERING_VERSION, SIZE, EM, BASELINE, MARGIN, drawn_by, files)
    arrays = cached_arrays("glyphs", identity, lambda: vars(render(fonts)))
    names, face_names = arrays.pop("names").tolist(), arrays.pop("face_names").tolist()
    return GlyphSet(**arrays, names=names, face_names=face_names)


def render(fonts: Sequence[Path]) -> GlyphSet:
    """Draw every named character of the given TrueType files."""
    drawn: list[tuple[np.ndarray, int, int]] = []
    for face, path in enumerate(fonts):
        # The basic layout is the same on all machines; Raqm is installed on some only.
        basic = ImageFont.Layout.BASIC
        of_size = functools.partial(ImageFont.truetype, str(path), layout_engine=basic)
        font = functools.cache(of_size)
        drawn += [(_draw(chr(code), font), face, code) for code in _characters(path)]
    images, faces, characters = map(np.array, zip(*drawn, strict=True))
    codes, name_ids = np.unique(characters, return_inverse=True)
    names = [unicodedata.name(chr(code)).lower() for code in codes]
    return GlyphSet(images, name_ids, faces, characters, names, [path.stem for path in fonts])


def _characters(path: Path) -> list[int]:
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]  # matplotlib brings it

    with TTFont(path, lazy=True) as font:
        points = sorted(font.getBestCmap())
    return [c for c in points if unicodedata.category(chr(c))[0] in "LNPS"]


def _draw(character: str, font: Callable[[int], ImageFont.FreeTypeFont]) -> np.ndarray:
    """Draw one character, uint8 (32, 32).

    All share one size and one baseline, so that "o", "O" and a superscript o differ. A glyph that
    does not fit is moved, and one that is too large is drawn smaller: nothing is cut off.
    """
    room = SIZE - 2 * MARGIN
    size = EM
    while True:
        left, top, right, bottom = font(size).getbbox(character, anchor="ls")
        extent = max(right - left, bottom - top)
        if extent <= room:
            break
        size = min(size - 1, int(size * room / extent))
    x = (SIZE - (right - left)) / 2 - left
    y = min(max(BASELINE, MARGIN - top), SIZE - MARGIN - bottom)
    image = Image.new("L", (SIZE, SIZE))
    # Whole pixels: a fraction would blur the same stroke differently from glyph to glyph.
    ImageDraw.Draw(image).text((int(x), int(y)), character, fill=255, font=font(size), anchor="ls")
    return np.asarray(image)


def _font_files() -> list[Path]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = sorted(folder.glob("DejaVu*.ttf"))
    if not fonts:
        raise UsageError(f"glyphs: no DejaVu*.ttf in {folder}, as in the matplotlib of pip")
    return fonts


def write_glyphs(pairs: GlyphSet, output: Path, *, samples_per_shard: int) -> list[Path]:
    """Write glyphs as WebDataset shards `output/00000.tar`, ... of png and txt; returns these.

    Samples keep their order, and the same glyphs give the same bytes. The whole folder appears at
    once: an interrupted run leaves no folder that lacks shards.

    Raises:
        UsageError: `output` exists and is not an empty folder, or cannot be written.
    """
    with new_folder(output) as folder:
        pattern = str(folder).replace("%", "%%") + "/%05d.tar"
        options = {"encoder": False, "mtime": 0, "verbose": 0}
        with ShardWriter(pattern, samples_per_shard, math.inf, **options) as writer:
            for pair in map(pairs.__getitem__, range(len(pairs))):
                png = io.BytesIO()
                pair.image.save(png, format="PNG")  # type: ignore[union-attr]
                sample = {"png": png.getvalue(), "txt": pair.caption.encode()}
                writer.write({"__key__": pair.key, **sample})
    return sorted(output.glob("*.tar"))
