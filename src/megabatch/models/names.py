"""The names of models, and mistakes in them that are found without importing a library."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

from megabatch.errors import UsageError, did_you_mean
from megabatch.hints import is_reference
from megabatch.models import weights

#: Our own models, each with a line on it.
OWN = {
    "glyph-small": "small towers for the built-in glyphs, for two CPU cores",
}
HUGGING_FACE, OPENCLIP = "hf:", "local-dir:"
#: Prefixes of folders, each with the file that such a folder has: of transformers'
#: `save_pretrained`, and of open_clip for the hub.
_FOLDERS = {OPENCLIP: "open_clip_config.json", HUGGING_FACE: "config.json"}
_HUB = "hf-hub:"  # open_clip's prefix for models that it downloads
_ARCHITECTURE = {"embed_dim", "vision_cfg", "text_cfg"}  # keys that open_clip requires


def openclip_names() -> list[str]:
    """open_clip's architectures, in its order.

    Importing open_clip takes seconds, so its files are read instead, unless it is imported anyway:
    then those added by `open_clip.add_model_config` are among them.
    """
    found = [] if "open_clip" in sys.modules else _in_package()
    if not found:
        import open_clip

        found = list(open_clip.list_models())
    return found


def _in_package() -> list[str]:
    spec = importlib.util.find_spec("open_clip")
    places = (spec and spec.submodule_search_locations) or []
    files = [path for place in places for path in Path(place).glob("model_configs/*.json")]
    names = [f.stem for f in files if json.loads(f.read_bytes()).keys() >= _ARCHITECTURE]
    return sorted(names, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name.lower())
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def check(name: str, pretrained: str | Path | None = None) -> None:
    """Check what `registry.create` is given as far as no library is needed for it.

    Raises:
        UsageError: there is no such model or folder, or no such file of weights.
    """
    prefix = next((prefix for prefix in _FOLDERS if name.startswith(prefix)), "")
    if prefix:
        _check_folder(name, prefix)
    elif not is_reference(name) and name not in OWN and name not in openclip_names():
        raise UsageError(f"--model: {name!r} is not known{_meant(name)}")
    if pretrained is None:
        return
    tag = str(pretrained)
    if re.fullmatch(r"[\w-]+", tag) and not Path(tag).exists():
        raise UsageError(
            f"--pretrained {tag}: expected a local file or folder (nothing is downloaded)"
            + ("" if prefix or name in OWN or is_reference(name) else _published(name, tag))
        )
    weights.find(Path(pretrained))


def has_weights(folder: Path) -> bool:
    """Whether a folder of Hugging Face's has a model's weights and not only its configuration."""
    return any(folder.glob("*.safetensors*")) or any(folder.glob("pytorch_model*.bin*"))


def is_trained(name: str) -> bool:
    """Whether a model starts with weights of its own, those of its folder."""
    folder = Path(name.partition(":")[2])
    return name.startswith(OPENCLIP) or (name.startswith(HUGGING_FACE) and has_weights(folder))


def is_text_encoder(name: str) -> bool:
    """Whether a name is that of a Hugging Face folder with one text encoder, for pairs of texts."""
    if not name.startswith(HUGGING_FACE):
        return False
    try:
        config = Path(name.removeprefix(HUGGING_FACE), _FOLDERS[HUGGING_FACE]).read_bytes()
        return "vision_config" not in json.loads(config)
    except (OSError, ValueError):  # told when the folder is read
        return False


def _check_folder(name: str, prefix: str) -> None:
    folder = Path(name.removeprefix(prefix))
    if (folder / _FOLDERS[prefix]).is_file():
        return
    if not folder.is_dir():
        raise UsageError(f"--model {name}: there is no folder {folder}{_download(folder, prefix)}")
    raise UsageError(f"--model {name}: {folder} has no {_FOLDERS[prefix]}{_other_prefix(folder)}")


def _other_prefix(folder: Path) -> str:
    found = (prefix for prefix, file in _FOLDERS.items() if (folder / file).is_file())
    return next((f"; did you mean {prefix}{folder}?" for prefix in found), "")


def _meant(name: str) -> str:
    """The end of the message for an unknown name."""
    if name.startswith(_HUB):
        return _download(Path(name.removeprefix(_HUB)), OPENCLIP)
    close = _other_prefix(Path(name)) or did_you_mean(name, [*OWN, *openclip_names()], 3)
    if not close and "/" in name:
        close = _download(Path(name), HUGGING_FACE)
    return f"{close} (`megabatch models` lists all)"


def _download(repository: Path, prefix: str) -> str:
    """The way to a model of the hub, if the path looks like its name there."""
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(repository)):
        return ""
    return (
        f", and nothing is downloaded. If it is on the Hugging Face hub: pip install "
        f"huggingface_hub; hf download {repository} --local-dir PATH; then --model {prefix}PATH"
    )


def _published(name: str, tag: str) -> str:
    """The way to weights that open_clip would download, which its table has by the tag."""
    printing = f"import open_clip as o; print(o.get_pretrained_cfg('{name}', '{tag}')['hf_hub'])"
    return (
        f'. For those that open_clip publishes, python -c "{printing}" prints the repository on '
        "the Hugging Face hub: pip install huggingface_hub; hf download REPOSITORY --local-dir "
        f"PATH; then --model {OPENCLIP}PATH instead"
    )
