"""Files of object stores, web servers and commands, copied to this machine once.

Every source is read at random through an index, which a remote file does not allow at any speed. So
its files are copied into the cache folder before they are indexed, several at a time, and found
there by later runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
from webdataset.gopen import gopen_pipe
from webdataset.shardlists import expand_urls

from megabatch.errors import UsageError, one_line
from megabatch.files import default_cache_dir, replacing
from megabatch.references import COMMAND, is_url

#: What stores tell of a file that changes with its content, each under a name of its own.
_STATE = {"contentmd5", "created", "digest", "etag", "lastmodified", "md5hash", "mtime", "size"}
_AT_A_TIME = 8  # files
_BLOCK = 1 << 22  # bytes


def local_copies(spec: str) -> list[Path]:
    """Copies of the files of a remote source, in `default_cache_dir()/remote`.

    A file is copied again if its size, date or tag has changed. A command's output, one shard, is
    kept by the command's text.

    Args:
        spec: a URL with braces or `*`; or `pipe:` and a command of the shell, with braces.

    Raises:
        UsageError: nothing matches, a file cannot be read, or a command fails.
    """
    # Not by the expanded text, or braces could hide a command.
    commands = spec.startswith(COMMAND)
    sources = expand_urls(spec) if commands else _matching(expand_urls(spec), spec)
    with ThreadPoolExecutor(min(_AT_A_TIME, len(sources))) as pool:
        return list(pool.map(_command_output if commands else _file_copy, sources))


def _matching(urls: Sequence[str], spec: str) -> list[str]:
    found: list[str] = []
    for url in urls:
        if not is_url(url):
            raise UsageError(f"{url}: expected a URL (from {spec!r})")
        found += _glob(url) if "*" in url else [url]
    return found


def _glob(url: str) -> list[str]:
    with _failures(url):
        system, path = fsspec.core.url_to_fs(url)
        names = sorted(system.glob(path))
    if not names:
        raise UsageError(f"nothing matches {url}")
    return [system.unstrip_protocol(name) for name in names]


def _file_copy(url: str) -> Path:
    with _failures(url):
        system, path = fsspec.core.url_to_fs(url)
        about = system.info(path)
    state = sorted((name, str(about[name])) for name in about if _plain(name) in _STATE)
    place = _place(f"{url} {state}", Path(path).name)
    with _only_process(place) as missing:
        if missing:
            with _failures(url):
                _copy(system.open(path, "rb"), place, url, about.get("size"))
    return place


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _command_output(command: str) -> Path:
    place = _place(command, "pipe.tar")
    with _only_process(place) as missing:
        if missing:
            with _failures(command):
                _copy(gopen_pipe(command, "rb"), place, command)
    return place


def _copy(source: Any, place: Path, name: str, size: int | None = None) -> None:
    """Copy an opened file; `size`: the bytes that it should have, if known."""
    shown = "" if size is None else f" ({size / 1e6:,.1f} MB)"
    print(f"copying {name}{shown} to {place}", file=sys.stderr)
    own = place.with_name(f"{place.name}-{uuid.uuid4().hex}.partial")
    with replacing(place, own) as partial:
        with contextlib.closing(source), partial.open("wb") as file:  # a command fails when closed
            shutil.copyfileobj(source, file, _BLOCK)
        if size is not None and partial.stat().st_size != size:
            raise OSError(f"{partial.stat().st_size:,} of {size:,} bytes came")


def _place(identity: str, name: str) -> Path:
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return default_cache_dir() / "remote" / digest / name


@contextlib.contextmanager
def _only_process(place: Path) -> Iterator[bool]:
    """Whether the file is missing; meanwhile the machine's other processes wait to ask that."""
    if place.exists():
        yield False
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = (place.parent / "lock").open("a")
    except OSError as error:
        raise UsageError(f"cannot write {place.parent}: {error.strerror or error}") from error
    with lock:
        with contextlib.suppress(OSError):  # a file system without locks: it is copied twice
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield not place.exists()


@contextlib.contextmanager
def _failures(name: str) -> Iterator[None]:
    """Name the source of an error; libraries of stores raise errors of their own."""
    try:
        yield
    except UsageError:
        raise
    except FileNotFoundError as error:
        raise UsageError(f"nothing matches {name}") from error
    except Exception as error:
        raise UsageError(f"cannot read {name}: {one_line(error, 300)}") from error
