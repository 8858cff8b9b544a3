"""`megabatch export RUN --to LIBRARY --output FOLDER`."""

from __future__ import annotations

from megabatch.evaluation.config import read_config
from megabatch.export.options import Export, Target
from megabatch.options import parse

_LOADED_BY: dict[Target, str] = {
    "openclip": "open_clip.create_model_and_transforms('local-dir:{}')",
    "huggingface": "transformers.AutoModel.from_pretrained('{}')",
    "sentence-transformers": "sentence_transformers.SentenceTransformer('{}')",
}


def main(argv: list[str]) -> int:
    """Export, print the call that loads the folder, and notes; returns the exit code."""
    options = parse(Export, argv, prog="megabatch export")
    read_config(options.run)
    from megabatch.export.run import export_run  # --help and errors import as little as possible

    notes = export_run(
        options.run,
        to=options.to,
        output=options.output,
        weights=options.weights,
        trust=options.trust,
    )
    print(f"{options.output}: load it with {_LOADED_BY[options.to].format(options.output)}")
    for note in notes:
        print(f"note: {note}")
    return 0
