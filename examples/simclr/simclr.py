"""SimCLR: which two views show the same handwritten digit?

Real data (scikit-learn's handwritten digits, 1,797 images of 8 x 8), a batch of two views of all
training images, gradients by GradientCache in micro-batches of 256, recall among views of images
that were never seen. Needs scikit-learn besides megabatch; takes seconds on a CPU.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import megabatch as mb

HELD_OUT = 300


def digits() -> tuple[Tensor, Tensor]:
    """Images (n, 8, 8) for training, and the held-out ones, in a random order."""
    images = torch.tensor(load_digits().images / 16, dtype=torch.float32)
    images = images[torch.randperm(len(images))]
    return images[HELD_OUT:], images[:HELD_OUT]


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


def new_encoder() -> nn.Module:
    """Features (n, 64), not normalised, of images (n, 8, 8)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def train(encoder: nn.Module, criterion: nn.Module, images: Tensor, steps: int) -> None:
    """Train on all images at once, and print the loss on the way."""
    step = mb.GradientCache((encoder, encoder), criterion, micro_batch_size=256)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    for i in range(steps):
        optimizer.zero_grad()
        loss = step(view_of(images), view_of(images))
        loss.backward()
        optimizer.step()
        if (i + 1) % 50 == 0 or i + 1 == steps:
            print(f"step {i + 1}: loss {loss:.3f}")


@torch.no_grad()
def recall(encoder: nn.Module, images: Tensor) -> float:
    """The share of views whose most similar view of another draw shows the same image."""
    views = [F.normalize(encoder(view_of(images))) for _ in range(2)]
    return mb.retrieval_metrics(*views)["x_to_y/recall@1"]


def main(criterion: nn.Module) -> None:
    """Train with a loss of two views, and print recall before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    images, held_out = digits()
    encoder = new_encoder()
    before = recall(encoder, held_out)
    train(encoder, criterion, images, steps)
    after, chance = recall(encoder, held_out), 1 / HELD_OUT
    print(f"recall@1: {before:.3f} before, {after:.3f} after, {chance:.3f} by chance")


if __name__ == "__main__":
    main(mb.NTXentLoss(temperature=0.2, normalize=True))
