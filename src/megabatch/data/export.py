"""Writing WebDataset shards: the glyphs, and whatever else comes as samples."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image
from webdataset.writer import TarWriter

from megabatch.data.glyphs import GlyphPairs
from megabatch.files import new_folder


class ShardWriter:
    """Writes samples to `folder/00000.tar`, ..., one shard at a time.

    The same samples give the same bytes.
    """

    def __init__(self, folder: Path, samples_per_shard: int) -> None:
        self.folder = folder
        self.samples_per_shard = samples_per_shard
        self.count = 0
        self._tar: TarWriter | None = None

    def write(self, sample: dict[str, Any]) -> None:
        """Add a sample: its name as `__key__`, and bytes by extension."""
        if self.count % self.samples_per_shard == 0:
            self.close()
            path = self.folder / f"{self.count // self.samples_per_shard:05d}.tar"
            self._tar = TarWriter(str(path), encoder=False, mtime=0)
        assert self._tar is not None
        self._tar.write(sample)
        self.count += 1

    def close(self) -> None:
        """Finish the last shard."""
        if self._tar is not None:
            self._tar.close()
            self._tar = None


def write_glyphs(pairs: GlyphPairs, output: str | Path, *, samples_per_shard: int) -> list[Path]:
    """Write glyphs as `output/00000.tar`, ...: png, txt, and json with img2dataset's field names.

    Samples keep their order, so sample i of the folder is sample i of `pairs`; the same glyphs
    give the same bytes. The whole folder appears at once: an interrupted run leaves no folder that
    lacks shards and could be mistaken for the whole set.

    Returns:
        The shards.

    Raises:
        UsageError: `output` exists and is not an empty folder, or cannot be written.
    """
    output = Path(output)
    with new_folder(output) as folder:
        writer = ShardWriter(folder, samples_per_shard)
        try:
            for index in range(len(pairs)):
                writer.write(_glyph_sample(pairs, index))
        finally:
            writer.close()
    return sorted(output.glob("*.tar"))


def _glyph_sample(pairs: GlyphPairs, index: int) -> dict[str, Any]:
    glyphs, pair, row = pairs.glyphs, pairs[index], pairs.indices[index]
    png = io.BytesIO()
    assert isinstance(pair.image, Image.Image)
    pair.image.save(png, format="PNG")
    fields = {
        "caption": pair.caption,
        "key": pair.key,
        "status": "success",
        "character": chr(glyphs.characters[row]),
        "face": glyphs.face_names[glyphs.faces[row]],
    }
    return {
        "__key__": pair.key,
        "png": png.getvalue(),
        "txt": pair.caption.encode(),
        "json": json.dumps(fields).encode(),
    }
