"""Distillation: a student with 150 pairs learns from the features of a teacher that had 1,497.

Real data (the halves of scikit-learn's handwritten digits, 1,797 images of 8 x 8): which right half
belongs to this left half? The student is trained twice, with CLIP's loss alone and with the
teacher's similarities as soft targets in addition. Recall is among 300 pairs that neither saw.
Needs scikit-learn besides megabatch; takes seconds on a CPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import megabatch as mb

HELD_OUT, FEW = 300, 150
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Towers(nn.Module):
    """Features (n, dim) of unit length of both halves of images (n, 8, 8), and a learnt scale."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Flatten(), nn.Linear(32, width), nn.GELU(), nn.Linear(width, dim))
            for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Left features, right features, scale."""
        x, y = self.left(images[:, :, :4]), self.right(images[:, :, 4:])
        return nn.functional.normalize(x), nn.functional.normalize(y), self.log_scale.exp()


def trained(towers: Towers, images: Tensor, loss: Loss, steps: int) -> Towers:
    """The towers after some steps on all images at once."""
    step = mb.GradientCache(towers, loss, micro_batch_size=512)
    optimizer = torch.optim.AdamW(towers.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        step(images).backward()
        optimizer.step()
    return towers


def main() -> None:
    """Train a teacher and two students, and print recall of all three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    digits = torch.tensor(load_digits().images / 16, dtype=torch.float32)
    digits = digits[torch.randperm(len(digits))]
    held_out, train = digits[:HELD_OUT], digits[HELD_OUT:]
    few = train[:FEW]

    teacher = trained(Towers(512, 64), train, mb.ClipLoss(), steps)
    with torch.no_grad():
        targets = teacher(few)
    distillation = mb.DistillClipLoss()

    def with_teacher(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        contrastive, distill = distillation(x, y, scale, *targets)
        return contrastive + distill

    students = {"alone": mb.ClipLoss(), "distilled": with_teacher}
    models = {"teacher": teacher}
    for name, loss in students.items():
        models[name] = trained(Towers(128, 32), few, loss, steps)
    for name, model in models.items():
        with torch.no_grad():
            x, y, _ = model(held_out)
        recall = mb.retrieval_metrics(x, y, ks=(10,))["x_to_y/recall@10"]
        print(f"{name}: recall@10 {recall:.3f}")
    print(f"chance: recall@10 {10 / HELD_OUT:.3f}")


if __name__ == "__main__":
    main()
