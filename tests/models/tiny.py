"""Very small open_clip architectures.

TINY has patch dropout, so that its steps use random numbers. TINY_UNMASKED's texts attend to their
padding.
"""

from pathlib import Path

import open_clip

CONFIG = Path(__file__).with_name("megabatch-test-tiny.json")
TINY = CONFIG.stem

TINY_UNMASKED = "megabatch-test-unmasked"

open_clip.add_model_config(CONFIG)
open_clip.add_model_config(CONFIG.with_name(f"{TINY_UNMASKED}.json"))
