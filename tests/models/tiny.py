"""Very small open_clip architectures.

TINY has patch dropout, so that its steps use random numbers. TINY_UNMASKED's texts attend to their
padding.
"""

from pathlib import Path
from typing import Any

import open_clip
import pytest

CONFIG = Path(__file__).with_name("megabatch-test-tiny.json")
TINY = CONFIG.stem

TINY_UNMASKED = "megabatch-test-unmasked"

open_clip.add_model_config(CONFIG)
open_clip.add_model_config(CONFIG.with_name(f"{TINY_UNMASKED}.json"))


def changed(monkeypatch: pytest.MonkeyPatch, changes: dict[str, dict[str, Any]]) -> str:
    """The name of TINY with some settings of a part changed, or of the whole ("model")."""
    config = open_clip.get_model_config(TINY)
    for part, values in changes.items():
        (config if part == "model" else config[part]).update(values)
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "changed", config)
    return "changed"
