from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megabatch.data import cache
from megabatch.data.cache import read_arrays, write_arrays
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
        assert read_arrays(tmp_path / "b.npz", ("x",)) is None


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch, failure):
    path = tmp_path / "a.npz"
    write_arrays(path, {"x": np.arange(3)})

    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr(cache.np, "savez_compressed", fail)
    if isinstance(failure, OSError):
        with pytest.warns(UserWarning, match="No space left"):
            write_arrays(path, {"x": np.arange(9)})
    else:
        with pytest.raises(KeyboardInterrupt):
            write_arrays(path, {"x": np.arange(9)})
    assert list(tmp_path.iterdir()) == [path]
    arrays = read_arrays(path, ("x",))
    assert arrays is not None
    assert len(arrays["x"]) == 3
