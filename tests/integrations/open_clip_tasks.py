"""A trainer with the interface of OpenCLIP 4's, in small: a task has the model and the loss.

It has neither processes nor accumulation. Batches are dicts, with a mask that the model does not
take, and texts that are as long as the longest in their batch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor, nn

SAMPLES, CONTEXT = 24, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.text = nn.EmbeddingBag(9, 3, mode="sum", padding_idx=0)
        self.logit_scale = nn.Parameter(torch.tensor([1.0]))
        self.logit_bias = nn.Parameter(torch.tensor([-1.0]))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        return {
            "image_features": nn.functional.normalize(self.image(image), dim=-1),
            "text_features": nn.functional.normalize(self.text(text), dim=-1),
            "logit_scale": self.logit_scale.exp(),
            "logit_bias": self.logit_bias.clone(),
        }


class CLIPTask(nn.Module):
    data_keys = ("image", "text")

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.trainable_module, self.loss = model, loss

    def prepare_batch(self, batch: Any, device: torch.device, input_dtype: Any = None) -> Any:
        return {name: tensor.to(device) for name, tensor in batch.items()}

    def forward(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        found = self.trainable_module(**{name: batch[name] for name in self.data_keys})
        losses = self.loss(**found, output_dict=True)
        return losses | {"loss": losses["contrastive_loss"]}, {"logit_scale": found["logit_scale"]}

    def batch_size(self, batch: dict[str, Any]) -> int:
        return len(batch["image"])


class SigLIPTask(CLIPTask):
    pass


class GenLipTask(CLIPTask):
    """A task that is none of two towers."""


TASKS = {"clip": (CLIPTask, ClipLoss), "siglip": (SigLIPTask, SigLipLoss)}
TASKS |= {"genlip": (GenLipTask, ClipLoss)}


class Loader:
    """The same samples for any size of batches, and a mask beside them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_batches, self.num_samples = SAMPLES // size, SAMPLES

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(SAMPLES, 5, generator=generator)
        texts = torch.randint(1, 9, (SAMPLES, CONTEXT), generator=generator)
        lengths = torch.arange(SAMPLES) % CONTEXT + 1
        texts[torch.arange(CONTEXT) >= lengths[:, None]] = 0
        for rows in torch.arange(SAMPLES).split(self.size):
            cut = texts[rows, : int(lengths[rows].max())]
            yield {"image": images[rows], "text": cut, "text_valid": cut != 0}


@dataclass
class Data:
    dataloader: Any


@dataclass
class State:
    task: Any
    optimizer: torch.optim.Optimizer
    samples_seen: int = 0
    losses: list[float] = field(default_factory=list)


class Trainer:
    """In place of the module `open_clip_train.main`; `state` is that of the last run."""

    state: State

    def parse_args(self, words: Sequence[str]) -> Namespace:
        kind, size, accum = words
        return Namespace(
            model=kind, batch_size=int(size), accum_freq=int(accum), rank=0, world_size=1,
            device="cpu", workers=0, distill_model=None, ddp_static_graph=False, torchcompile=False,
            siglip=kind == "siglip",
        )  # fmt: skip

    @staticmethod
    def create_task(args: Namespace, model: nn.Module, naflex_data_config: Any = None) -> CLIPTask:
        task, loss = TASKS[args.model]
        return task(model, loss())

    @staticmethod
    def train_one_epoch(state: State, data: Any, args: Namespace, tb_writer: Any = None) -> None:
        assert args.accum_freq == 1
        state.task.train()
        for batch in data["train"].dataloader:
            prepared = state.task.prepare_batch(batch, device=torch.device("cpu"), input_dtype=None)
            state.optimizer.zero_grad()
            losses, report = state.task(prepared)
            losses["loss"].backward()
            state.optimizer.step()
            state.samples_seen += state.task.batch_size(prepared)
            state.losses.append(losses["loss"].item())
            assert report["logit_scale"].numel() == 1

    def main(self, words: Sequence[str]) -> None:
        args = self.parse_args(words)
        torch.manual_seed(0)
        model = Model()
        task = self.create_task(args, model=model, naflex_data_config=None)
        self.state = State(task, torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in range(2):
            data = {"train": Data(Loader(args.batch_size))}
            self.train_one_epoch(self.state, data, args, tb_writer=None)
            assert self.state.task is task
