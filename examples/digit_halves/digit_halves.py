"""Two towers and a loop of your own: which right half belongs to this left half of a digit?

Real data (scikit-learn's handwritten digits, 1,797 images of 8 x 8), a batch of all training pairs,
gradients by GradientCache in micro-batches of 128, recall on pairs that were never seen. Needs
scikit-learn besides megabatch; takes seconds on a CPU.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import megabatch as mb

HELD_OUT = 300


class HalfTower(nn.Module):
    """Features (n, 64) of unit length of half images (n, 8, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)
        )

    def forward(self, half: Tensor) -> Tensor:
        """Encode."""
        return F.normalize(self.layers(half))


def main() -> None:
    """Train, print the loss on the way and recall at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    digits = torch.tensor(load_digits().images / 16, dtype=torch.float32)
    digits = digits[torch.randperm(len(digits))]
    train, held_out = digits[HELD_OUT:], digits[:HELD_OUT]

    left, right = HalfTower(), HalfTower()
    log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    clip = mb.ClipLoss()
    step = mb.GradientCache(
        (left, right), lambda x, y: clip(x, y, log_scale.exp()), micro_batch_size=128
    )
    optimizer = torch.optim.AdamW([*left.parameters(), *right.parameters(), log_scale], lr=2e-3)
    for i in range(steps):
        optimizer.zero_grad()
        loss = step(train[:, :, :4], train[:, :, 4:])
        loss.backward()  # fills every .grad, log_scale's too
        optimizer.step()
        if (i + 1) % 50 == 0 or i + 1 == steps:
            print(f"step {i + 1}: loss {loss:.3f}")

    left.eval()
    right.eval()
    with torch.no_grad():
        metrics = mb.retrieval_metrics(left(held_out[:, :, :4]), right(held_out[:, :, 4:]))
    for name, value in metrics.items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
