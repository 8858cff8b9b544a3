"""Gradient caching: a large batch's exact gradients in the memory of one micro-batch."""

from megabatch.gradient_cache.by_length import SortedByLength
from megabatch.gradient_cache.step import GradientCache
from megabatch.gradient_cache.wrappers import UnusedParameters

__all__ = ["GradientCache", "SortedByLength", "UnusedParameters"]
