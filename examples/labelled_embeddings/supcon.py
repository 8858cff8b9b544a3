"""Labelled embeddings: handwritten digits close to those of their class (SupCon).

Real data (scikit-learn's handwritten digits, 1,797 images of 8 x 8), a batch of all training
images, gradients by GradientCache in micro-batches of 256. recall@1 is the share of held-out images
whose most similar training image shows the same digit. Needs scikit-learn besides megabatch; takes
seconds on a CPU.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import megabatch as mb

HELD_OUT = 300


@torch.no_grad()
def recall_at_1(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of held-out images whose most similar training image has their label."""
    embeddings = F.normalize(model(images))
    _, nearest = mb.similarity.topk(embeddings[:HELD_OUT], embeddings[HELD_OUT:], 1)
    same = labels[HELD_OUT:][nearest[:, 0]] == labels[:HELD_OUT]
    return same.float().mean().item()


def main(criterion: nn.Module) -> None:
    """Train with a loss of embeddings and labels, and print recall before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[order]
    labels = torch.tensor(digits.target)[order]
    train, classes = images[HELD_OUT:], labels[HELD_OUT:]

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    step = mb.GradientCache(model, lambda z: criterion(z, classes), micro_batch_size=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    before = recall_at_1(model, images, labels)
    for i in range(steps):
        optimizer.zero_grad()
        loss = step(train)
        loss.backward()
        optimizer.step()
        if (i + 1) % 10 == 0 or i + 1 == steps:
            print(f"step {i + 1}: loss {loss:.3f}")
    after, chance = recall_at_1(model, images, labels), labels.bincount().max() / len(labels)
    print(f"recall@1: {before:.3f} before, {after:.3f} after, {chance:.3f} by chance")


if __name__ == "__main__":
    main(mb.SupConLoss(temperature=0.2, normalize=True))
