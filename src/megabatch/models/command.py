"""`megabatch models`."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import dataclass

from megabatch.models.names import OWN, openclip_names
from megabatch.options import parse

_FORMS = {
    **OWN,
    "hf:PATH": "a folder that transformers' save_pretrained wrote: a model of images and texts "
    "(CLIP, SigLIP), or a text encoder, for pairs of texts",
    "local-dir:PATH": "a folder that open_clip saved for the hub",
    "module:function": "your own model",
}


@dataclass(frozen=True)
class Models:
    """List the models that --model takes.

    Nothing is downloaded: weights come from PATH or from --pretrained, a local file or folder; a
    model without them starts with random ones.
    """


def main(argv: list[str]) -> int:
    """Print the names; returns the exit code."""
    parse(Models, argv, prog="megabatch models")
    width = min(shutil.get_terminal_size().columns, 100)

    def wrap(text: str, first: str, others: str) -> str:
        return textwrap.fill(
            *(text, width),
            initial_indent=first,
            subsequent_indent=others,
            break_on_hyphens=False,
            break_long_words=False,
        )

    # Not those that write captions, too.
    trainable = [name for name in openclip_names() if not name.startswith("coca_")]
    print("architectures of open_clip:")
    print(wrap("  ".join(trainable), "  ", "  "))
    print("megabatch's own, and folders:")
    for name, summary in _FORMS.items():
        print(wrap(summary, f"  {name:<16}", " " * 18))
    return 0
