"""SimCLR with lightly's loss, replaced: which two views show the same handwritten digit?

Real data (scikit-learn's handwritten digits, 1,797 images of 8 x 8), a batch of two views of all
training images, gradients by GradientCache in micro-batches of 256, recall on images that were
never seen. Needs lightly and scikit-learn beside megabatch; takes seconds on a CPU.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import megabatch as mb
from megabatch.integrations.lightly import NTXentLoss  # before: from lightly.loss import NTXentLoss

HELD_OUT = 300


def view_of(images: Tensor) -> Tensor:
    """Images turned by up to 15 degrees, scaled, moved by up to a pixel, and with noise."""
    n = len(images)
    angle = (torch.rand(n) - 0.5) * 0.5
    scale = 1 + (torch.rand(n) - 0.5) * 0.3
    cos, sin, shift = scale * angle.cos(), scale * angle.sin(), (torch.rand(2, n) - 0.5) * 0.5
    rows = torch.stack([cos, -sin, shift[0]], 1), torch.stack([sin, cos, shift[1]], 1)
    grid = F.affine_grid(torch.stack(rows, 1), [n, 1, 8, 8], align_corners=False)
    moved = F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]
    return moved + 0.1 * torch.randn_like(moved)


def main() -> None:
    """Train, print the loss on the way and recall at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    images = torch.tensor(load_digits().images / 16, dtype=torch.float32)
    images = images[torch.randperm(len(images))]
    train, held_out = images[HELD_OUT:], images[:HELD_OUT]

    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    criterion = NTXentLoss(temperature=0.2)
    step = mb.GradientCache((encoder, encoder), criterion, micro_batch_size=256)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    for i in range(steps):
        optimizer.zero_grad()
        loss = step(view_of(train), view_of(train))
        loss.backward()
        optimizer.step()
        if (i + 1) % 50 == 0 or i + 1 == steps:
            print(f"step {i + 1}: loss {loss:.3f}")

    with torch.no_grad():
        views = [F.normalize(encoder(view_of(held_out))) for _ in range(2)]
        metrics = mb.retrieval_metrics(*views)
    for name, value in metrics.items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
