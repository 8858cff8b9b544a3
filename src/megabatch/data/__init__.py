"""Image-caption pairs: the built-in glyphs, WebDataset shards, tables; and batches of them."""

from megabatch.data.glyphs import GlyphPairs, GlyphSet, load_glyphs
from megabatch.data.loader import Batch, PairLoader
from megabatch.data.pairs import ArrayDataset, BadSample, BatchTransform, Pair, PairDataset
from megabatch.data.sources import open_pairs

__all__ = [
    "ArrayDataset",
    "BadSample",
    "Batch",
    "BatchTransform",
    "GlyphPairs",
    "GlyphSet",
    "Pair",
    "PairDataset",
    "PairLoader",
    "load_glyphs",
    "open_pairs",
]
