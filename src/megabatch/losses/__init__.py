"""Contrastive losses, each a few lines over `megabatch.similarity`."""

from megabatch.losses.clip import ClipLoss
from megabatch.losses.dcl import DCLLoss
from megabatch.losses.infonce import InfoNCELoss
from megabatch.losses.matryoshka import MatryoshkaLoss
from megabatch.losses.multimodal import MultiModalLoss
from megabatch.losses.ntxent import NTXentLoss
from megabatch.losses.siglip import SigLipLoss
from megabatch.losses.supcon import SupConLoss

__all__ = [
    "ClipLoss",
    "DCLLoss",
    "InfoNCELoss",
    "MatryoshkaLoss",
    "MultiModalLoss",
    "NTXentLoss",
    "SigLipLoss",
    "SupConLoss",
]
