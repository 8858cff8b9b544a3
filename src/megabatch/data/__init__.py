"""Pairs of images and captions, or of texts: sources, and batches of them."""

from typing import TYPE_CHECKING

from megabatch.imports import lazy

if TYPE_CHECKING:
    from megabatch.data.glyphs import GlyphSet, load_glyphs
    from megabatch.data.loader import Batch, PairLoader
    from megabatch.data.pairs import BadSample, Pair, PairDataset
    from megabatch.data.sources import open_pairs

__all__ = [
    "BadSample",
    "Batch",
    "GlyphSet",
    "Pair",
    "PairDataset",
    "PairLoader",
    "load_glyphs",
    "open_pairs",
]

__getattr__ = lazy(__name__)
