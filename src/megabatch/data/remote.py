"""Files of object stores, web servers and commands, copied to this machine once.

Every source is read at random through an index, which a remote file does not allow at any speed. So
its files are copied into the cache folder before they are indexed, several at a time, and found
there by later runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import re
import shutil
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
from webdataset.gopen import gopen_pipe
from webdataset.shardlists import expand_urls

from megabatch.config.file import COMMAND, is_url
from megabatch.errors import UsageError, one_line
from megabatch.files import default_cache_dir, replacing

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
    sources = expand_urls(spec)
    is_command = spec.startswith(COMMAND)  # not the expanded text: braces could hide a command
    if not is_command:
        sources = [name for url in sources for name in _named(_glob, url)]
    with ThreadPoolExecutor(min(_AT_A_TIME, len(sources))) as pool:
        copied = functools.partial(_named, _command_output if is_command else _file_copy)
        return list(pool.map(copied, sources))


def _named(work: Callable[[str], Any], source: str) -> Any:
    """work(source), whose errors name the source; libraries of stores raise errors of their own."""
    try:
        return work(source)
    except FileNotFoundError as error:
        raise UsageError(f"nothing matches {source}") from error
    except Exception as error:
        raise UsageError(f"cannot read {source}: {one_line(error, 300)}") from error


def _glob(url: str) -> list[str]:
    if not is_url(url):
        raise ValueError("expected a URL")
    if "*" not in url:
        return [url]
    system, path = fsspec.core.url_to_fs(url)
    if not (names := sorted(system.glob(path))):
        raise FileNotFoundError(url)
    return [system.unstrip_protocol(name) for name in names]


def _file_copy(url: str) -> Path:
    system, path = fsspec.core.url_to_fs(url)
    about = system.info(path)
    state = {k: v for k, v in about.items() if re.sub("[-_]", "", k.lower()) in _STATE}
    identity = f"{url} {sorted((k, str(v)) for k, v in state.items())}"
    return _copy(identity, Path(path).name, url, lambda: system.open(path, "rb"), about.get("size"))


def _command_output(command: str) -> Path:
    return _copy(command, "pipe.tar", command, lambda: gopen_pipe(command, "rb"))


def _copy(
    identity: str, name: str, source: str, opened: Callable[[], Any], size: int | None = None
) -> Path:
    """Copy what `opened` gives if there is no copy of this identity yet; returns the copy.

    The machine's other processes wait for it. size: the bytes that it should have, if known.
    """
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    place = default_cache_dir() / "remote" / digest / name
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / "lock").open("a") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: it is copied twice
            fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return place
        shown = "" if size is None else f" ({size / 1e6:,.1f} MB)"
        print(f"copying {source}{shown} to {place}", file=sys.stderr)
        own = place.with_name(f"{name}-{uuid.uuid4().hex}.partial")
        with replacing(place, own) as partial:
            with contextlib.closing(opened()) as source_file, partial.open("wb") as file:
                shutil.copyfileobj(source_file, file, _BLOCK)  # closing raises a command's error
            if size is not None and partial.stat().st_size != size:
                raise OSError(f"{partial.stat().st_size:,} of {size:,} bytes came")
    return place
