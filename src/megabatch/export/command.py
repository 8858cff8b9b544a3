"""`megabatch export RUN --to LIBRARY --output FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from megabatch.errors import UsageError
from megabatch.evaluation.config import read_config
from megabatch.options import CONFIG, parse

Target = Literal["openclip", "huggingface", "sentence-transformers"]


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
    license: str = "unknown"
    """License of the model for its model card, as the hub names it: apache-2.0, mit, other ..."""
    push_to_hub: str | None = None
    """NAME/REPO of the Hugging Face hub to upload the folder to; needs a token (hf auth login)."""
    private: bool = False
    """With --push-to-hub: make a private repository."""


def main(argv: list[str]) -> int:
    """Export, print the call that loads the folder, and notes; upload it; returns the exit code."""
    options = parse(Export, argv, prog="megabatch export", positional="run")
    multi_vector = read_config(options.run).get("loss") == "maxsim"
    given = dict(vars(options))
    repo, private = given.pop("push_to_hub"), given.pop("private")
    if private and repo is None:
        raise UsageError("--private: expected with --push-to-hub")
    from megabatch.export import hub  # --help and errors import as little as possible
    from megabatch.export.card import load_call
    from megabatch.export.run import export_run

    if repo is not None:
        hub.check(repo)
    notes = export_run(**given, repo=repo)
    call = load_call(options.to, str(options.output), multi_vector=multi_vector)
    print(f"{options.output}: load it with {call}")
    for note in notes:
        print(f"note: {note}")
    if repo is not None:
        again = f"push_to_hub({str(options.output)!r}, {repo!r}, private={private})"
        print(f"uploading to {repo}; if that is interrupted: megabatch.export.{again}", flush=True)
        for note in hub.push_to_hub(options.output, repo, private=private):
            print(f"note: {note}")
    return 0
