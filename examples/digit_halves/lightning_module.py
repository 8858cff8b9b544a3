"""A LightningModule with gradient caching: which right half belongs to this left half of a digit?

Real data (scikit-learn's handwritten digits, 1,797 images of 8 x 8), a batch of all training pairs,
in micro-batches of 128, recall on pairs that were never seen. Needs scikit-learn and lightning.
"""

from __future__ import annotations

import argparse
import math

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import megabatch as mb
from megabatch.integrations.lightning import MegabatchMixin

HELD_OUT = 300


class DigitHalves(MegabatchMixin, lightning.LightningModule):
    """Two towers of half images (n, 8, 4), and a learnt scale."""

    micro_batch_size = 128

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Flatten(), nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.clip = mb.ClipLoss(normalize=True)

    def encoders(self) -> tuple[nn.Module, nn.Module]:
        """One for each half."""
        return self.left, self.right

    def contrastive_loss(self, left: Tensor, right: Tensor) -> Tensor:
        """CLIP's, of the features of all pairs."""
        loss: Tensor = self.clip(left, right, self.log_scale.exp())
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Recall among the pairs of the batch."""
        left, right = (F.normalize(e(x)) for e, x in zip(self.encoders(), batch, strict=True))
        self.log_dict(mb.retrieval_metrics(left, right))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    """Train, and print recall at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps

    lightning.seed_everything(0)
    digits = torch.tensor(load_digits().images / 16, dtype=torch.float32)
    digits = digits[torch.randperm(len(digits))]
    pairs = TensorDataset(digits[:, :, :4], digits[:, :, 4:])
    held_out, train = (
        DataLoader(TensorDataset(*pairs[rows]), batch_size=len(digits))
        for rows in (slice(HELD_OUT), slice(HELD_OUT, None))
    )
    module = DigitHalves()
    trainer = lightning.Trainer(
        max_steps=steps,
        max_epochs=-1,
        log_every_n_steps=50,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, train)
    for name, value in trainer.test(module, held_out, verbose=False)[0].items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
