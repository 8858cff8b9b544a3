"""The options of an export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from megabatch.hints import Positional

Target = Literal["openclip", "huggingface", "sentence-transformers"]
Weights = Literal["final", "ema"]


@dataclass(frozen=True)
class Export:
    """Write a run's model as a folder that another library loads, with the same embeddings.

    Nothing is downloaded. The folder appears when it is complete.
    """

    run: Annotated[Path, Positional("RUN")]
    """The run's folder: config.toml with model.safetensors or checkpoints."""
    to: Target
    """The library: openclip for OpenCLIP's models; huggingface for models and text encoders of
    transformers, and for ViTs of OpenCLIP that are of CLIPModel's form; sentence-transformers for
    models of pairs of texts, such as retrievers."""
    output: Path
    """Folder to create. If it exists, it must be empty."""
    weights: Weights = "final"
    """The trained weights, or their moving average (model-ema.safetensors)."""
    trust: bool = False
    """Allow the configuration of RUN to name code to run: a model of the form module:function."""
