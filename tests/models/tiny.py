"""A very small open_clip architecture, with patch dropout so that its steps use random numbers."""

from pathlib import Path

import open_clip

CONFIG = Path(__file__).with_name("megabatch-test-tiny.json")
TINY = CONFIG.stem

open_clip.add_model_config(CONFIG)
