"""Writing the glyphs as WebDataset shards."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

from PIL import Image
from webdataset.writer import ShardWriter

from megabatch.data.glyphs import GlyphPairs
from megabatch.files import new_folder


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
        pattern = str(folder).replace("%", "%%") + "/%05d.tar"
        options = {"encoder": False, "mtime": 0, "verbose": 0}
        with ShardWriter(pattern, samples_per_shard, math.inf, **options) as writer:
            for index in range(len(pairs)):
                writer.write(_glyph_sample(pairs, index))
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
