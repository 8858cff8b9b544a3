"""Contrastive losses, each a few lines over `megabatch.similarity`."""

from typing import TYPE_CHECKING

from megabatch.imports import lazy

if TYPE_CHECKING:
    from megabatch.losses.clip import ClipLoss
    from megabatch.losses.dcl import DCLLoss
    from megabatch.losses.distill import DistillClipLoss
    from megabatch.losses.infonce import InfoNCELoss
    from megabatch.losses.matryoshka import MatryoshkaLoss
    from megabatch.losses.multimodal import MultiModalLoss
    from megabatch.losses.ntxent import NTXentLoss
    from megabatch.losses.siglip import SigLipLoss
    from megabatch.losses.sincere import SincereLoss
    from megabatch.losses.supcon import SupConLoss

__all__ = [
    "ClipLoss",
    "DCLLoss",
    "DistillClipLoss",
    "InfoNCELoss",
    "MatryoshkaLoss",
    "MultiModalLoss",
    "NTXentLoss",
    "SigLipLoss",
    "SincereLoss",
    "SupConLoss",
]

# Imported on first access, as the registry in this package is read without torch.
__getattr__ = lazy(__name__)
