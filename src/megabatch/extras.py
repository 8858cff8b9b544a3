"""Which extra brings a library that is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megabatch.errors import UsageError

#: What each extra brings beside torch, as it is imported. In a library's absence the first extra
#: that has it is named; the one of the command that runs goes before.
EXTRAS = {
    "train": frozenset(
        {
            *("jinja2", "matplotlib", "numpy", "open_clip", "PIL", "psutil", "pyarrow"),
            *("resvg_py", "rich", "safetensors", "sklearn", "tensorboard", "timm", "tomli"),
            *("torchvision", "webdataset"),
        }
    ),
    "hf": frozenset({"tokenizers", "transformers"}),
    "bench": frozenset({"matplotlib", "open_clip", "psutil", "rich"}),
    "peers": frozenset(
        {"cut_cross_entropy", "inf_cl", "liger_kernel", "memeff", "open_clip", "siglip_kernel"}
    ),
}

#: Libraries that are installed under another name than the one that is imported.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "open_clip": "open_clip_torch",
    "resvg_py": "resvg-py",
    "sklearn": "scikit-learn",
}


class MissingLibrary(UsageError, ImportError):
    """A library that was needed for what was asked is not installed."""


@contextlib.contextmanager
def named_extras(extra: str = "train") -> Iterator[None]:
    """Say which extra to install where a library turns out to be missing.

    Args:
        extra: the one of the command that runs: named first, and for what the extras' libraries
            themselves require.

    Raises:
        MissingLibrary: in place of a ModuleNotFoundError of anybody's but our own modules.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", "megabatch"):
            raise
        raise MissingLibrary(missing(module, extra)) from error


def missing(module: str, extra: str = "train") -> str:
    """One sentence: what is not installed, and what to type."""
    order = sorted(EXTRAS, key=lambda name: name != extra)
    chosen = next((name for name in order if module in EXTRAS[name]), extra)
    library = DISTRIBUTIONS.get(module, module)
    return f"{library} is not installed, which this needs: pip install 'megabatch[{chosen}]'"
