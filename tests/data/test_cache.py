"""Arrays, and shards and tables of object stores (here fsspec's memory) and commands, cached."""

from __future__ import annotations

import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megabatch.data import open_pairs
from megabatch.data.cache import cached_arrays
from megabatch.errors import UsageError
from megabatch.files import default_cache_dir
from megabatch.training import TrainConfig, load_config, save_config
from tests.data.samples import png, write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "remote"


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two shards of two pairs each."""
    members = [
        (f"{i}.{kind}", png(i) if kind == "png" else b"%d" % i)
        for i in range(4)
        for kind in ("png", "txt")
    ]
    return [write_tar(tmp_path / f"{n}.tar", members[4 * n : 4 * n + 4]) for n in range(2)]


@pytest.fixture
def store(shards: list[Path]) -> Any:
    """A store with these shards, at memory://shards."""
    found = fsspec.filesystem("memory")
    for path in shards:
        found.pipe(f"/shards/{path.name}", path.read_bytes())
    yield found
    found.rm("/shards", recursive=True)


def captions(spec: str) -> list[str]:
    pairs = open_pairs(spec)
    return [pairs[i].caption for i in range(len(pairs))]


def copies(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*/*") if path.name != "lock")


@pytest.mark.parametrize("spec", ["memory://shards/{0..1}.tar", "memory://shards/*.tar"])
def test_shards_of_a_store_are_copied_once(
    store: Any, spec: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert captions(spec) == ["0", "1", "2", "3"]
    assert capsys.readouterr().err.count("copying memory://") == 2
    assert copies(cache) == ["0.tar", "1.tar"]
    assert captions(spec) == ["0", "1", "2", "3"]
    assert capsys.readouterr().err == ""


def test_files_of_a_web_server(shards: list[Path], cache: Path) -> None:
    handler = partial(Quiet, directory=str(shards[0].parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            at = f"http://127.0.0.1:{server.server_port}"
            assert captions(f"{at}/{{0,1}}.tar") == ["0", "1", "2", "3"]
            os.utime(shards[1], (1e9, 1e9))  # its Last-Modified
            assert captions(f"{at}/{{0,1}}.tar") == ["0", "1", "2", "3"]
            with pytest.raises(UsageError, match=r"nothing matches http://.*/2\.tar"):
                open_pairs(f"{at}/2.tar")
        finally:
            server.shutdown()
            thread.join()
    assert copies(cache) == ["0.tar", "1.tar", "1.tar"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *words: Any) -> None:
        pass


def test_what_a_command_prints_is_kept(shards: list[Path], tmp_path: Path, cache: Path) -> None:
    spec = f"pipe:echo x >> {tmp_path}/calls; cat {tmp_path}/{{0,1}}.tar"
    for _ in range(2):
        assert captions(spec) == ["0", "1", "2", "3"]
    assert (tmp_path / "calls").read_text() == "x\n" * 2  # for two shards
    assert copies(cache) == ["pipe.tar", "pipe.tar"]


@pytest.mark.parametrize("command", ["cat nowhere.tar", "cat {0}; exit 3"])
def test_a_command_that_fails_is_an_error_and_leaves_nothing(
    shards: list[Path], cache: Path, command: str
) -> None:
    spec = "pipe:" + command.format(shards[0])
    with pytest.raises(UsageError, match=r"cannot read pipe:cat .*exit status [13]"):
        open_pairs(spec)
    assert copies(cache) == []


def test_braces_hide_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for spec in (
        "{pipe,x}:touch evil",
        "memory://{a,}::pipe:touch evil",
        "a://{b,}{pipe:touch evil,}",
    ):
        with pytest.raises(UsageError):
            load_and_open(tmp_path, spec)
    assert not (tmp_path / "evil").exists()


def load_and_open(folder: Path, spec: str) -> None:
    """What a configuration of somebody else can do."""
    save_config(TrainConfig(train_data=spec), folder / "config.toml")
    open_pairs(load_config(folder / "config.toml").train_data)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("memory://shards/9.tar", "nothing matches memory://shards/9.tar"),
        ("memory://shards/9*.tar", "nothing matches memory://shards/9*.tar"),
        ("s4://bucket/0.tar", "cannot read s4://bucket/0.tar: Protocol not known: s4"),
    ],
)
def test_what_cannot_be_read_is_named(store: Any, spec: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_pairs(spec)
    assert str(caught.value).startswith(message)


def test_a_copy_that_breaks_off_is_no_copy(
    store: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = MemoryFileSystem.info

    def larger(self: Any, path: str, **options: Any) -> dict[str, Any]:
        found = info(self, path, **options)
        return {**found, "size": 10**6}

    monkeypatch.setattr(MemoryFileSystem, "info", larger)
    with pytest.raises(UsageError, match=r"0\.tar: 10,240 of 1,000,000 bytes came"):
        open_pairs("memory://shards/0.tar")
    assert copies(cache) == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("MEGABATCH_CACHE")
    assert default_cache_dir() == tmp_path / "xdg" / "megabatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "megabatch"


def arrays(identity: object) -> np.ndarray:
    return cached_arrays("kind", identity, lambda: {"x": [7]})["x"]


def cached(cache: Path) -> list[Path]:
    return [path for path in cache.parent.rglob("*") if path.is_file()]


def test_arrays_are_made_once_or_again_if_they_cannot_be_read(cache: Path) -> None:
    assert arrays("a") == arrays("b") == 7
    assert len(cached(cache)) == 2
    assert cached_arrays("kind", "a", lambda: pytest.fail("made again"))["x"] == 7
    whole = cached(cache)[0].read_bytes()
    np.savez(cached(cache)[1], x=np.array([{"a": 1}], dtype=object))  # no pickle is loaded
    for damaged in (b"", b"no archive", whole[:50], whole[:-10]):
        cached(cache)[0].write_bytes(damaged)
        assert arrays("a") == arrays("b") == 7
    assert cached_arrays("kind", "a", lambda: pytest.fail("made again"))["x"] == 7


def test_a_cache_that_cannot_be_written_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("numpy.savez_compressed", full)
    with pytest.warns(UserWarning, match="not cached: .*No space left"):
        assert arrays("a") == 7
    assert cached(cache) == []
