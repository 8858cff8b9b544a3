"""Contrastive losses, each a few lines over `megabatch.similarity`."""

from megabatch.losses.clip import ClipLoss

__all__ = ["ClipLoss"]
