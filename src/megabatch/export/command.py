"""`megabatch export RUN --to LIBRARY --output FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from megabatch.evaluation.config import read_config
from megabatch.options import CONFIG, parse

Target = Literal["openclip", "huggingface", "sentence-transformers"]


_LOADED_BY: dict[Target, str] = {
    "openclip": "open_clip.create_model_and_transforms('local-dir:{}')",
    "huggingface": "transformers.AutoModel.from_pretrained('{}')",
    "sentence-transformers": "sentence_transformers.SentenceTransformer('{}')",
}


@dataclass(frozen=True, config=CONFIG)
class Export:
    """Write a run's model as a folder that another library loads, with the same embeddings.

    Nothing is downloaded. The folder appears when it is complete.
    """

    run: Path
    """The run's folder: config.toml with model.safetensors or checkpoints."""
    to: Target
    """The library: openclip for OpenCLIP's models; huggingface for models and text encoders of
    transformers, and for ViTs of OpenCLIP that are of CLIPModel's form; sentence-transformers for
    models of pairs of texts, such as retrievers."""
    output: Path
    """Folder to create. If it exists, it must be empty."""
    weights: Literal["final", "ema"] = "final"
    """The trained weights, or their moving average (model-ema.safetensors)."""
    trust: bool = False
    """Allow the configuration of RUN to name code to run: a model of the form module:function."""


def main(argv: list[str]) -> int:
    """Export, print the call that loads the folder, and notes; returns the exit code."""
    options = parse(Export, argv, prog="megabatch export", positional="run")
    config = read_config(options.run)
    from megabatch.export.run import export_run  # --help and errors import as little as possible

    notes = export_run(**vars(options))
    call = _LOADED_BY[options.to].format(options.output)
    if config.get("loss") == "maxsim":
        call = call.replace("SentenceTransformer", "MultiVectorEncoder")
    print(f"{options.output}: load it with {call}")
    for note in notes:
        print(f"note: {note}")
    return 0
