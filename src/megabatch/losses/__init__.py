"""Contrastive losses, each a few lines over `megabatch.similarity`."""

from typing import TYPE_CHECKING

from megabatch.imports import lazy

if TYPE_CHECKING:
    from megabatch.losses.clip import ClipLoss, DistillClipLoss
    from megabatch.losses.infonce import InfoNCELoss
    from megabatch.losses.labels import SincereLoss, SupConLoss
    from megabatch.losses.matryoshka import MatryoshkaLoss
    from megabatch.losses.maxsim import MaxSimLoss
    from megabatch.losses.multimodal import MultiModalLoss
    from megabatch.losses.siglip import SigLipLoss
    from megabatch.losses.views import DCLLoss, NTXentLoss

__all__ = [
    "ClipLoss",
    "DCLLoss",
    "DistillClipLoss",
    "InfoNCELoss",
    "MatryoshkaLoss",
    "MaxSimLoss",
    "MultiModalLoss",
    "NTXentLoss",
    "SigLipLoss",
    "SincereLoss",
    "SupConLoss",
]

# Imported on first access, as the registry in this package is read without torch.
__getattr__ = lazy(__name__)
