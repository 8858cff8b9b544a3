"""Contrastive losses, each a few lines over `megabatch.similarity`."""

from typing import TYPE_CHECKING

from megabatch.lazy import lazy

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
__getattr__ = lazy(
    __name__,
    {
        "ClipLoss": "megabatch.losses.clip",
        "DCLLoss": "megabatch.losses.dcl",
        "DistillClipLoss": "megabatch.losses.distill",
        "InfoNCELoss": "megabatch.losses.infonce",
        "MatryoshkaLoss": "megabatch.losses.matryoshka",
        "MultiModalLoss": "megabatch.losses.multimodal",
        "NTXentLoss": "megabatch.losses.ntxent",
        "SigLipLoss": "megabatch.losses.siglip",
        "SincereLoss": "megabatch.losses.sincere",
        "SupConLoss": "megabatch.losses.supcon",
    },
)
