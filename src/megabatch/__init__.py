"""Exact contrastive training at any batch size."""

from typing import TYPE_CHECKING

from megabatch.imports import lazy

if TYPE_CHECKING:
    from megabatch import similarity
    from megabatch.evaluation.retrieval import retrieval_metrics
    from megabatch.gradient_cache import GradientCache, SortedByLength
    from megabatch.losses import (
        ClipLoss,
        DCLLoss,
        DistillClipLoss,
        InfoNCELoss,
        MatryoshkaLoss,
        MaxSimLoss,
        MultiModalLoss,
        NTXentLoss,
        SigLipLoss,
        SincereLoss,
        SupConLoss,
    )

__all__ = [
    "ClipLoss",
    "DCLLoss",
    "DistillClipLoss",
    "GradientCache",
    "InfoNCELoss",
    "MatryoshkaLoss",
    "MaxSimLoss",
    "MultiModalLoss",
    "NTXentLoss",
    "SigLipLoss",
    "SincereLoss",
    "SortedByLength",
    "SupConLoss",
    "retrieval_metrics",
    "similarity",
]
__version__ = "0.2.0"

__getattr__ = lazy(__name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
