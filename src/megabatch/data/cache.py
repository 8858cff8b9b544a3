"""The cache folder: arrays that can be computed again, and copies of remote files.

Sources are read at random, so the files of object stores, web servers and commands are copied.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import subprocess
import sys
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from webdataset.shardlists import expand_urls

from megabatch import files
from megabatch.config.file import COMMAND
from megabatch.errors import UsageError, one_line
from megabatch.files import default_cache_dir, replacing

#: What stores tell of a file that changes with its content, each under a name of its own.
_STATE = {"contentmd5", "created", "digest", "etag", "lastmodified", "md5hash", "mtime", "size"}
_AT_A_TIME = 8  # files


def _place(kind: str, identity: object, name: str) -> Path:
    """The path in the cache of what belongs to an identity."""
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
    return default_cache_dir() / kind / digest / name


@contextlib.contextmanager
def _written(place: Path) -> Iterator[Path]:
    """A file to write, which is then complete or not there; several processes may write it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    own = place.with_name(f"{place.name}-{uuid.uuid4().hex}.partial")
    with replacing(place, own) as partial:
        yield partial


def cached_arrays(
    kind: str, identity: object, make: Callable[[], Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    """Return an identity's arrays, made if the cache has none to read; warn if it takes none."""
    place = _place(kind, identity, "arrays.npz")
    damage = (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error)
    with contextlib.suppress(*damage), np.load(place, allow_pickle=False) as arrays:
        return dict(arrays)
    made = {name: np.asarray(value) for name, value in make().items()}
    try:
        with _written(place) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **made)  # type: ignore[arg-type]  # no name is its flag
    except OSError as error:
        warnings.warn(f"not cached: {error}", stacklevel=3)
    return made


def local_copies(spec: str) -> list[Path]:
    """Copies of the files of a remote source, in `default_cache_dir()/remote`, made once.

    A file is copied again if its size, date or tag has changed.

    Args:
        spec: a URL with braces or `*`; or `pipe:` and a command of the shell, with braces, whose
            output is a shard.

    Raises:
        UsageError: nothing matches, a file cannot be read, or a command fails.
    """
    sources = expand_urls(spec)
    is_command = spec.startswith(COMMAND)  # not the expanded text: braces could hide a command
    if not is_command:
        sources = [name for url in sources for name in _told(_glob, url)]
    with ThreadPoolExecutor(min(_AT_A_TIME, len(sources))) as pool:
        copied = functools.partial(_told, _command_output if is_command else _file)
        return list(pool.map(copied, sources))


def _told(work: Callable[[str], Any], source: str) -> Any:
    """work(source), whose errors name the source; libraries of stores raise errors of their own."""
    try:
        return work(source)
    except FileNotFoundError as error:
        raise UsageError(f"nothing matches {source}") from error
    except Exception as error:
        raise UsageError(f"cannot read {source}: {one_line(error, 300)}") from error


def is_url(source: str) -> bool:
    """Whether a data source has the form of a URL, such as s3://bucket/a.tar."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source) is not None


def _glob(url: str) -> list[str]:
    if not is_url(url):
        raise ValueError("expected a URL")
    if "*" not in url:
        return [url]
    system, path = fsspec.core.url_to_fs(url)
    if not (names := sorted(system.glob(path))):
        raise FileNotFoundError(url)
    return [system.unstrip_protocol(name) for name in names]


def _command_output(command: str) -> Path:
    def run(copy: Path) -> None:
        with copy.open("wb") as output:
            subprocess.run(command.removeprefix(COMMAND), shell=True, stdout=output, check=True)

    return _copied(command, "pipe.tar", command, run)


def _file(url: str) -> Path:
    system, path = fsspec.core.url_to_fs(url)
    about = system.info(path)
    state = {k: str(v) for k, v in about.items() if re.sub("[-_]", "", k.lower()) in _STATE}

    def get(copy: Path) -> None:
        system.get_file(path, str(copy))
        if about["size"] not in (None, size := copy.stat().st_size):
            raise OSError(f"{size:,} of {about['size']:,} bytes came")

    return _copied((url, sorted(state.items())), Path(path).name, url, get)


def _copied(identity: object, name: str, source: str, write: Callable[[Path], None]) -> Path:
    """The copy of a source, written if it is not there; the machine's other processes wait."""
    place = _place("remote", identity, name)
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / "lock").open("a") as lock:
        files.lock(lock, wait=True)  # without locks it is copied twice
        if place.exists():
            return place
        print(f"copying {source} to {place}", file=sys.stderr)
        with _written(place) as partial:
            write(partial)
    return place
