"""Hugging Face's Trainer and CLIPModel: which right half belongs to this left half of a digit?

Real data (scikit-learn's handwritten digits, 1,797 images of 8 x 8). The image tower sees the left
half; the text tower reads the right one, whose 32 pixels are tokens of 17 shades. A batch has 500
pairs, in micro-batches of 100. Needs scikit-learn, transformers and accelerate.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, EvalPrediction, TrainingArguments, set_seed

import megabatch as mb
from megabatch.integrations.transformers import MegabatchTrainer

HELD_OUT, SHADES = 300, 17
END = SHADES  # CLIP's text feature is the state at the first token of this kind


def halves() -> list[dict[str, Tensor]]:
    """The pairs, in random order: what the model takes, one row each."""
    digits = torch.tensor(load_digits().images)
    digits = digits[torch.randperm(len(digits))]
    images = digits.float() / 16
    images[:, :, 4:] = 0
    tokens = digits[:, :, 4:].flatten(1).long()
    tokens = torch.cat([tokens, torch.full((len(tokens), 1), END)], dim=1)
    return [
        {"pixel_values": i, "input_ids": t} for i, t in zip(images[:, None], tokens, strict=True)
    ]


def small_clip() -> CLIPModel:
    """A CLIP of one layer a tower, with random weights."""
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 4}
    vision = tower | {"image_size": 8, "patch_size": 2, "num_channels": 1}
    text = tower | {"vocab_size": SHADES + 1, "max_position_embeddings": 33, "eos_token_id": END}
    return CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=64))


def recall(prediction: EvalPrediction) -> dict[str, float]:
    """Recall over all pairs of an evaluation; predictions are the features of both sides."""
    image, text = map(torch.tensor, prediction.predictions)
    return mb.retrieval_metrics(image, text, group="local")  # each process has the features of all


def main() -> None:
    """Train, and print the loss and recall of pairs that were never seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    set_seed(0)
    data = halves()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=500,
            per_device_eval_batch_size=HELD_OUT,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            logging_steps=25,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = MegabatchTrainer(
            small_clip(),
            arguments,
            train_dataset=data[HELD_OUT:],
            eval_dataset=data[:HELD_OUT],
            compute_metrics=recall,
            micro_batch_size=100,
        )
        trainer.train()
        for name, value in trainer.evaluate().items():
            print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
