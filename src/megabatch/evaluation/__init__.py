"""Retrieval and zero-shot evaluation, of features or of a whole run.

`retrieval_metrics` needs only torch; `evaluate_run` needs the trainer's libraries
(`megabatch[train]`).
"""

from typing import TYPE_CHECKING

from megabatch.imports import lazy

if TYPE_CHECKING:
    from megabatch.evaluation.retrieval import retrieval_metrics
    from megabatch.evaluation.run import evaluate_run

__all__ = ["evaluate_run", "retrieval_metrics"]

__getattr__ = lazy(__name__)
