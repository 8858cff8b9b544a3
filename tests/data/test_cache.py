from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megabatch.data import cache
from megabatch.data.cache import cached_arrays
from megabatch.files import default_cache_dir


def test_cache_folder(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("MEGABATCH_CACHE")
    assert default_cache_dir() == tmp_path / "xdg" / "megabatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "megabatch"


def test_no_pickle_is_loaded(tmp_path: Path):
    objects = np.array([{"a": 1}], dtype=object)
    np.savez(tmp_path / "b.npz", x=objects)
    with pytest.warns(UserWarning, match="unreadable"):
        assert cached_arrays(tmp_path / "b.npz", ("x",), lambda: {"x": [7]})["x"] == 7


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch, failure):
    path = tmp_path / "a.npz"

    def fail(*args, **kwargs):
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(cache.np, "savez_compressed", fail)
        if isinstance(failure, OSError):
            with pytest.warns(UserWarning, match="No space left"):
                assert len(cached_arrays(path, ("x",), lambda: {"x": np.arange(9)})["x"]) == 9
        else:
            with pytest.raises(KeyboardInterrupt):
                cached_arrays(path, ("x",), lambda: {"x": np.arange(9)})
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        assert len(cached_arrays(path, ("x",), lambda: {"x": np.arange(3)})["x"]) == 3
    assert list(tmp_path.iterdir()) == [path]
