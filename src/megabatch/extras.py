"""The extra to install if a library is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megabatch.errors import UsageError

#: The libraries of each extra besides torch, by the names they are imported by. A missing library
#: is attributed to the running command's extra if that has it, else to the first extra that has it.
EXTRAS = {
    "train": frozenset(
        {
            *("jinja2", "matplotlib", "numpy", "open_clip", "PIL", "psutil", "pyarrow"),
            *("resvg_py", "rich", "safetensors", "simplejpeg", "sklearn", "tensorboard", "timm"),
            *("tomli", "torchvision", "webdataset"),
        }
    ),
    "watch": frozenset({"alembic", "mlflow", "sqlalchemy", "wandb"}),
    "hf": frozenset({"tokenizers", "transformers"}),
    "bench": frozenset({"matplotlib", "open_clip", "psutil", "rich"}),
    "peers": frozenset(
        {"cut_cross_entropy", "inf_cl", "liger_kernel", "memeff", "open_clip", "siglip_kernel"}
    ),
}

#: Libraries whose distribution has another name than their module.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "open_clip": "open_clip_torch",
    "resvg_py": "resvg-py",
    "sklearn": "scikit-learn",
}


class MissingLibrary(UsageError, ImportError):
    """A library that the call needs is not installed."""


@contextlib.contextmanager
def named_extras(extra: str = "train") -> Iterator[None]:
    """Name the extra to install if an import inside fails.

    Args:
        extra: the running command's, preferred, and assumed for dependencies of its libraries.

    Raises:
        MissingLibrary: instead of a ModuleNotFoundError, except for megabatch's own modules.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", "megabatch"):
            raise
        raise MissingLibrary(missing(module, extra)) from error


def missing(module: str, extra: str = "train") -> str:
    """One sentence: the missing library and the command that installs it."""
    order = sorted(EXTRAS, key=lambda name: name != extra)
    chosen = next((name for name in order if module in EXTRAS[name]), extra)
    library = DISTRIBUTIONS.get(module, module)
    return f"{library} is not installed, which this needs: pip install 'megabatch[{chosen}]'"
