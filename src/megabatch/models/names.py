"""The names of models, and their list; libraries are imported by the functions that need them."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic.dataclasses import dataclass

from megabatch.errors import UsageError, did_you_mean
from megabatch.options import CONFIG, is_reference, parse

#: Our own model.
GLYPH = "glyph-small"
HUGGING_FACE, OPENCLIP = "hf:", "local-dir:"
CONFIGURATION = "open_clip_config.json"  # of a folder that open_clip saved for the hub
#: Prefixes of folders, each with the file that such a folder has.
_FOLDERS = {OPENCLIP: CONFIGURATION, HUGGING_FACE: "config.json"}
#: How to get a model that is not here.
DOWNLOAD = (
    "nothing is downloaded; for a model of the Hugging Face hub: pip install huggingface_hub; "
    "hf download OWNER/NAME --local-dir PATH; then --model hf:PATH or, of OpenCLIP, local-dir:PATH"
)


@dataclass(frozen=True, config=CONFIG)
class Models:
    """List the models that --model takes.

    Nothing is downloaded: weights come from PATH or from --pretrained, a local file or folder; a
    model without them starts with random ones. "module:function" is a model of your own.
    """


def main(argv: list[str]) -> int:
    """Print the names (`megabatch models`); returns the exit code."""
    parse(Models, argv, prog="megabatch models")
    # Not those that write captions, too.
    names = [name for name in available() if not name.startswith("coca_")]
    print(*names, *(f"{prefix}PATH" for prefix in _FOLDERS), "module:function", sep="\n")
    return 0


def available() -> list[str]:
    """The names that `create` takes apart from folders and code: ours first, then open_clip's."""
    import open_clip

    return [GLYPH, *open_clip.list_models()]


def check(name: str) -> None:
    """Check that there is a model of this name, or its folder.

    Raises:
        UsageError: there is none.
    """
    prefix = next((prefix for prefix in _FOLDERS if name.startswith(prefix)), "")
    if prefix:
        file = Path(name.removeprefix(prefix), _FOLDERS[prefix])
        if not file.is_file():
            raise UsageError(f"--model {name}: there is no {file}; {DOWNLOAD}")
    elif name != GLYPH and not is_reference(name) and name not in available():
        hint = f"; {DOWNLOAD}" if "/" in name else did_you_mean(name, available(), 3)
        raise UsageError(f"--model: {name!r} is not known{hint} (`megabatch models` lists all)")


def has_weights(folder: Path) -> bool:
    """Whether a folder has a model's weights and not only its configuration."""
    return any(folder.glob("*.safetensors*")) or any(folder.glob("pytorch_model*.bin*"))


def is_trained(name: str) -> bool:
    """Whether a model starts with weights of its own, those of its folder."""
    folder = Path(name.partition(":")[2])
    if name.startswith(OPENCLIP) and (folder / "open_clip_pytorch_model.bin").is_file():
        return True
    return name.startswith((OPENCLIP, HUGGING_FACE)) and has_weights(folder)


def is_text_encoder(name: str) -> bool:
    """Whether a name is that of a Hugging Face folder with one text encoder, for pairs of texts."""
    if not name.startswith(HUGGING_FACE):
        return False
    try:
        config = Path(name.removeprefix(HUGGING_FACE), _FOLDERS[HUGGING_FACE]).read_bytes()
        return "vision_config" not in json.loads(config)
    except (OSError, ValueError):  # told when the folder is read
        return False
