"""Metric learning with pytorch-metric-learning's loss, replaced: handwritten digits by class.

Real data (scikit-learn's handwritten digits, 1,797 images of 8 x 8), a batch of all training
images, gradients by GradientCache in micro-batches of 256. recall@1 is the share of held-out images
whose most similar training image shows the same digit. Needs pytorch-metric-learning and
scikit-learn beside megabatch; takes seconds on a CPU.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import megabatch as mb

# Before: from pytorch_metric_learning.losses import SupConLoss
from megabatch.integrations.pytorch_metric_learning import SupConLoss

HELD_OUT = 300


@torch.no_grad()
def recall_at_1(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of held-out images whose most similar training image has their label."""
    embeddings = F.normalize(model(images))
    _, nearest = mb.similarity.topk(embeddings[:HELD_OUT], embeddings[HELD_OUT:], 1)
    same = labels[HELD_OUT:][nearest[:, 0]] == labels[:HELD_OUT]
    return same.float().mean().item()


def main() -> None:
    """Train, print the loss on the way and recall at the end."""
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
    criterion = SupConLoss(temperature=0.2)
    step = mb.GradientCache(model, lambda z: criterion(z, classes), micro_batch_size=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    print(f"before: recall@1 {recall_at_1(model, images, labels):.3f}")
    for i in range(steps):
        optimizer.zero_grad()
        loss = step(train)
        loss.backward()
        optimizer.step()
        if (i + 1) % 10 == 0 or i + 1 == steps:
            print(f"step {i + 1}: loss {loss:.3f}")
    print(f"after: recall@1 {recall_at_1(model, images, labels):.3f}")


if __name__ == "__main__":
    main()
