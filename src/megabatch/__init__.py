"""Exact contrastive training at any batch size."""

from megabatch import similarity
from megabatch.evaluation.retrieval import retrieval_metrics
from megabatch.gradient_cache import GradientCache
from megabatch.losses import (
    ClipLoss,
    DCLLoss,
    InfoNCELoss,
    MatryoshkaLoss,
    MultiModalLoss,
    NTXentLoss,
    SigLipLoss,
    SupConLoss,
)

__all__ = [
    "ClipLoss",
    "DCLLoss",
    "GradientCache",
    "InfoNCELoss",
    "MatryoshkaLoss",
    "MultiModalLoss",
    "NTXentLoss",
    "SigLipLoss",
    "SupConLoss",
    "retrieval_metrics",
    "similarity",
]
__version__ = "0.1.0"
