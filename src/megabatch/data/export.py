"""Write the built-in sets as WebDataset shards."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from webdataset.writer import TarWriter

from megabatch.data.glyphs import GlyphPairs
from megabatch.errors import UsageError


def write_shards(pairs: GlyphPairs, output: str | Path, *, samples_per_shard: int) -> list[Path]:
    """Write glyphs as `output/00000.tar`, ...: png, txt, and json as img2dataset names its fields.

    Samples keep their order, so sample i of the folder is sample i of `pairs`; the same glyphs
    give the same bytes. The whole folder appears at once, by a rename: an interrupted run leaves
    no folder that is short of shards and could be mistaken for the whole set.

    Returns:
        The shards.

    Raises:
        UsageError: `output` exists and is not an empty folder, or cannot be written.
    """
    output = Path(output)
    with new_folder(output) as partial:
        for number, start in enumerate(range(0, len(pairs), samples_per_shard)):
            stop = min(start + samples_per_shard, len(pairs))
            _write_shard(pairs, range(start, stop), partial / f"{number:05d}.tar")
    return sorted(output.glob("*.tar"))


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes `output` at the end, or vanishes on an error.

    Raises:
        UsageError: `output` exists and is not an empty folder, or cannot be written.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"{output} exists and is not an empty folder; choose another --output")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}.partial-"))
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from error
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())  # mkdtemp's folders are the user's alone
        os.replace(partial, output)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shard(pairs: GlyphPairs, indices: range, path: Path) -> None:
    glyphs = pairs.glyphs
    with open(path, "wb") as file, TarWriter(file, encoder=False, mtime=0) as tar:
        for index in indices:
            pair = pairs[index]
            at = pairs.indices[index]
            png = io.BytesIO()
            assert isinstance(pair.image, Image.Image)
            pair.image.save(png, format="PNG")
            facts = {
                "caption": pair.caption,
                "key": pair.key,
                "status": "success",
                "character": chr(glyphs.characters[at]),
                "face": glyphs.face_names[glyphs.faces[at]],
            }
            tar.write(
                {
                    "__key__": pair.key,
                    "png": png.getvalue(),
                    "txt": pair.caption.encode(),
                    "json": json.dumps(facts).encode(),
                }
            )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
