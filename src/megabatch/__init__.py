"""Exact contrastive training at any batch size."""

from megabatch import similarity
from megabatch.evaluation.retrieval import retrieval_metrics
from megabatch.gradient_cache import GradientCache
from megabatch.losses import ClipLoss

__all__ = ["ClipLoss", "GradientCache", "retrieval_metrics", "similarity"]
__version__ = "0.1.0"
