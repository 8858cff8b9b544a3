"""The built-in glyph set: images of characters with their Unicode names.

Every letter, number, punctuation mark and symbol (Unicode general categories L, N, P, S) that one
of the 14 DejaVu faces inside matplotlib can draw: 45,715 images of 6,494 names. Marks, separators
and control characters are left out: they have no shape of their own. 21 of the images are blank
in the font itself (the blank Braille pattern, the object replacement character).

The same name recurs in up to 14 faces, which makes real false negatives, and 13% of a face's
characters look exactly like another character of that face (Latin A, Greek Alpha).
"""

from __future__ import annotations

import functools
import hashlib
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
from PIL import Image, ImageDraw, ImageFont, features

from megabatch.data.cache import cached_arrays
from megabatch.data.pairs import Pair
from megabatch.errors import UsageError
from megabatch.files import default_cache_dir

SIZE = 32  # pixels per side
EM = 24  # font size in pixels: 19 glyphs of 20 fit without shrinking
BASELINE = 24  # pixel row that letters stand on: room for accents above and descenders below
MARGIN = 1  # pixels around the ink that stay empty

# No other face is both bold and serif, so few of these images also occur in training: 12% to the
# pixel (symbols that two faces share), against 20-40% for most other pairs of faces.
HELD_OUT_FACES = ("DejaVuSerif-Bold", "DejaVuSerif-BoldItalic")
HELD_OUT_PERCENT = 8  # of the names
SPLITS = ("train", "faces", "characters", "all")

_ARRAYS = ("images", "name_ids", "faces", "characters", "names", "face_names")
_RENDERING_VERSION = 1  # increase it when the same fonts would give other arrays


@dataclass(frozen=True)
class GlyphSet:
    """All glyph images with their names.

    images: uint8 (n, 32, 32), white ink on black; name_ids: int64 (n,), index into `names`, the
    same in every split; faces: int64 (n,), index into `face_names`; characters: int64 (n,), code
    points; names: the distinct names, lower case, in code point order.
    """

    images: np.ndarray
    name_ids: np.ndarray
    faces: np.ndarray
    characters: np.ndarray
    names: list[str]
    face_names: list[str]

    def __len__(self) -> int:
        return len(self.images)

    def split(self, name: str) -> GlyphPairs:
        """Return one part of the set.

        "train": names that are not held out, in the faces that are not held out.
        "faces": the held-out faces' images of names that occur in "train".
        "characters": images of held-out names, in the faces that are not held out.
        "all": everything; the names that only the held-out faces can draw, and their images of
        held-out names, are in no other split.

        Images, names: train 36,098 of 5,758; faces 5,804 of 2,902; characters 3,097 of 504.

        Raises:
            ValueError: there is no such split.
        """
        if name not in SPLITS:
            raise ValueError(f"split: {name!r}; expected one of {', '.join(SPLITS)}")
        held_faces = [i for i, face in enumerate(self.face_names) if face in HELD_OUT_FACES]
        new_face = np.isin(self.faces, held_faces)
        new_name = np.array([is_held_out(n) for n in self.names], dtype=bool)[self.name_ids]
        train = ~new_face & ~new_name
        chosen = {
            "train": train,
            "faces": new_face & np.isin(self.name_ids, self.name_ids[train]),
            "characters": new_name & ~new_face,
            "all": np.ones(len(self), dtype=bool),
        }[name]
        return GlyphPairs(self, np.flatnonzero(chosen))


class GlyphPairs:
    """Part of a glyph set as a data set of pairs.

    `indices`: int64 (n,), of the samples in `glyphs`.
    """

    def __init__(self, glyphs: GlyphSet, indices: np.ndarray) -> None:
        self.glyphs = glyphs
        self.indices = indices
        self.damage: list[str] = []

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Pair:
        at = self.indices[index]
        glyphs = self.glyphs
        face = glyphs.face_names[glyphs.faces[at]]
        return Pair(
            image=Image.fromarray(glyphs.images[at]),
            caption=glyphs.names[glyphs.name_ids[at]],
            key=f"{face}_u{glyphs.characters[at]:04x}",
        )

    def arrays(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return images, uint8 (b, 1, 32, 32), of many samples at once."""
        return self.glyphs.images[self.indices[np.asarray(indices)], None]

    def texts(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Return their captions."""
        at = self.indices[np.asarray(indices)]
        return [self.glyphs.names[i] for i in self.glyphs.name_ids[at]]

    @property
    def images(self) -> np.ndarray:
        """The split's images, uint8 (n, 32, 32)."""
        return self.glyphs.images[self.indices]

    @property
    def name_ids(self) -> np.ndarray:
        """The split's name ids, int64 (n,), index into `glyphs.names`."""
        return self.glyphs.name_ids[self.indices]

    @property
    def faces(self) -> np.ndarray:
        """The split's faces, int64 (n,), index into `glyphs.face_names`."""
        return self.glyphs.faces[self.indices]


def is_held_out(name: str) -> bool:
    """Whether a character is held out: 8 names of 100, picked by a hash of the name alone."""
    # A hash, not a random draw: a new character in a font does not change the others' split.
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def load_glyphs(cache_dir: str | Path | None = None) -> GlyphSet:
    """Return the glyph set, rendered on first use (about two seconds) and cached.

    `cache_dir`: default `$MEGABATCH_CACHE`, else `$XDG_CACHE_HOME/megabatch`, else
    `~/.cache/megabatch`. The cache file's name contains a hash of the fonts and of everything that
    determines the pixels, so a new matplotlib or Pillow makes a new file. If the folder cannot be
    written, there is a warning, and the set is rendered each time.

    Raises:
        UsageError: matplotlib is installed without its fonts.
    """
    fonts = _font_files()
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    path = folder / f"glyphs-{_cache_key(fonts)}.npz"
    arrays = cached_arrays(path, _ARRAYS, lambda: vars(render(fonts)))
    names, face_names = arrays.pop("names").tolist(), arrays.pop("face_names").tolist()
    return GlyphSet(**arrays, names=names, face_names=face_names)


def render(fonts: Sequence[Path]) -> GlyphSet:
    """Draw every named character of the given TrueType files."""
    images: list[np.ndarray] = []
    faces: list[int] = []
    characters: list[int] = []
    for face, path in enumerate(fonts):
        # The basic layout is the same on all machines; Raqm is installed on some only.
        basic = ImageFont.Layout.BASIC
        font = functools.cache(
            functools.partial(ImageFont.truetype, str(path), layout_engine=basic)
        )
        for character in _characters(path):
            images.append(_draw(chr(character), font))
            faces.append(face)
            characters.append(character)
    distinct, name_ids = np.unique(np.array(characters, dtype=np.int64), return_inverse=True)
    return GlyphSet(
        images=np.stack(images),
        name_ids=name_ids.astype(np.int64),
        faces=np.array(faces, dtype=np.int64),
        characters=np.array(characters, dtype=np.int64),
        names=[unicodedata.name(chr(c)).lower() for c in distinct],
        face_names=[path.stem for path in fonts],
    )


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
        raise UsageError(
            f"glyphs: no DejaVu*.ttf in {folder}; this matplotlib was packaged without its fonts"
            " (the one that pip installs has them)"
        )
    return fonts


def _cache_key(fonts: Sequence[Path]) -> str:
    drawn_by = (
        _RENDERING_VERSION,
        (SIZE, EM, BASELINE, MARGIN),
        PIL.__version__,
        features.version("freetype2"),
        unicodedata.unidata_version,
    )
    digest = hashlib.sha256(repr(drawn_by).encode())
    for path in fonts:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
