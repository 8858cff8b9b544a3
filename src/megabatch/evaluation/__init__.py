"""Retrieval and zero-shot evaluation, of features or of a whole run.

`retrieval_metrics` needs torch alone; `evaluate_run` needs the trainer's libraries
(`megabatch[train]`) and is therefore imported only when it is asked for.
"""

from __future__ import annotations

from typing import Any

from megabatch.evaluation.retrieval import chance_metrics, retrieval_metrics

__all__ = ["chance_metrics", "evaluate_run", "retrieval_metrics"]


def __getattr__(name: str) -> Any:
    if name == "evaluate_run":
        from megabatch.evaluation.run import evaluate_run

        return evaluate_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
