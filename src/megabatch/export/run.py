"""Export a run's model to another library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

from safetensors import SafetensorError

from megabatch.errors import UsageError, one_line
from megabatch.evaluation.run_folder import Opened, open_run
from megabatch.export import hugging_face, openclip
from megabatch.export.card import write_card
from megabatch.files import new_folder
from megabatch.imports import named_extras
from megabatch.models import Towers
from megabatch.models.hf_images import PooledTower
from megabatch.models.huggingface import TextEncoder, TokenEncoder
from megabatch.models.towers import TwoTowers
from megabatch.options import is_reference

#: Writes a model's files into an empty folder; returns sentences that its users must know.
Writer: TypeAlias = Callable[[Opened, Path], list[str]]


@named_extras()
def export_run(
    run: str | Path,
    *,
    to: str,
    output: str | Path,
    weights: Literal["final", "ema"] = "final",
    trust: bool = False,
    license: str = "unknown",
    repo: str | None = None,
) -> list[str]:
    """Write a run's model as a folder that another library loads, with the same embeddings.

    Args:
        run: the run's folder: `config.toml` with `model.safetensors` or checkpoints. A folder that
            its `model` names (`hf:PATH`, `local-dir:PATH`) must still be in its place.
        to: the library: "openclip", "huggingface" or "sentence-transformers".
        output: the folder to create, which appears when it is complete.
        weights: the trained ones, or "ema", their moving average.
        trust: whether the run's `model` may be code to run (`module:function`).
        license: the hub's name of the model's license, for the model card.
        repo: "NAME/REPO" of the hub, from where the model card loads the model.

    Returns:
        Sentences on differences that a user of the folder must know, if there are any.

    Raises:
        UsageError: the run cannot be read, the library has no such models, or `output` exists and
            is not an empty folder, or cannot be written.
    """
    output = Path(output)
    with new_folder(output) as folder:
        opened = open_run(Path(run), ema=weights == "ema", trust=trust)
        opened.towers.module.eval()
        write = _writer(opened.towers, to)
        try:
            notes = write(opened, folder)
            write_card(folder, opened, to, repo or output.resolve().name, license, notes)
            return notes
        except SafetensorError as error:  # a full disk, say
            raise UsageError(f"cannot write {output}: {one_line(error, 200)}") from error


def _writer(towers: Towers, to: str) -> Writer:
    """The function that writes this model for a library; UsageError if the library has no such."""
    kind, writers = _writers(towers)
    if to in writers:
        return writers[to]
    instead = f"expected --to {' or '.join(writers)}"
    if not writers:
        instead = f"megabatch.models.create({towers.name!r}, pretrained=RUN) loads it"
    raise UsageError(f"--to {to}: {towers.name} is {kind}, for which {to} has no format; {instead}")


def _writers(towers: Towers) -> tuple[str, dict[str, Writer]]:
    """A description of the model's kind, and its writers by library."""
    module = towers.module
    visual = getattr(module, "visual", None)
    if isinstance(visual, TokenEncoder):
        return "a text encoder with a vector for each token", {
            "sentence-transformers": hugging_face.write_sentence_model
        }
    if isinstance(visual, TextEncoder) and module.text is None:
        return "a Hugging Face text encoder", {
            "sentence-transformers": hugging_face.write_sentence_model,
            "huggingface": hugging_face.write_encoder,
        }
    if isinstance(visual, TextEncoder):
        return "a pair of two text encoders", {
            "sentence-transformers": hugging_face.write_sentence_model
        }
    if isinstance(visual, PooledTower):
        return "a Hugging Face model of images and texts", {"huggingface": hugging_face.write_clip}
    if is_reference(towers.name):
        return "a model of your own", {}
    if isinstance(module, TwoTowers):
        return "an architecture of megabatch's own", {}
    return "an OpenCLIP model", {"openclip": openclip.write, "huggingface": openclip.write_clip}
