"""Lightning, Hugging Face's Trainer and sentence-transformers train as without gradient caching.

They accumulate over two batches, clip gradients and evaluate, on one process and on two. No library
knows of gradient caching: each calls `backward()` of the loss that it is given.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from megabatch.gradient_cache import GradientCache
from megabatch.losses import ClipLoss
from megabatch.training.world import leave
from tests.models.tiny_bert import save_tiny_bert
from tests.similarity.distributed.processes import forked, new_store

WIDTH, DIMS, SAMPLES, BATCH = 5, 4, 32, 4
LETTERS = "abcdefgh"
LIBRARIES = ["lightning", "transformers", "sentence_transformers"]

Weights = dict[str, Tensor]


class Pair(nn.Module):
    """Two towers and a learnt scale; computes the loss whole or in micro-batches of 2."""

    def __init__(self, cached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.x, self.y = (
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, DIMS)) for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.loss = ClipLoss()
        self.step = GradientCache((self.x, self.y), self.score, 2) if cached else None

    def score(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(F.normalize(x), F.normalize(y), self.log_scale.exp())

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.score(self.x(x), self.y(y)) if self.step is None else self.step(x, y)}


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2)]


def of_lightning(cached: bool, folder: Path, processes: int) -> tuple[nn.Module, Weights]:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair(cached)

        def training_step(self, batch: Any) -> Tensor:
            loss: Tensor = self.pair(*batch)["loss"]
            return loss

        def validation_step(self, batch: Any) -> None:
            assert not self.pair(*batch)["loss"].requires_grad

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    plugins = []
    if processes > 1:
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        plugins = [TorchElasticEnvironment()]
    trainer = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        plugins=plugins,
        num_sanity_val_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module, data = Module(), TensorDataset(*samples())
    before = weights_of(module)
    trainer.fit(module, DataLoader(data, BATCH), DataLoader(data, BATCH))
    return module, before


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.x, self.y = samples()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "y": self.y[i]}


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.05,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }


def of_transformers(cached: bool, folder: Path, processes: int) -> tuple[nn.Module, Weights]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = Pair(cached)
    before = weights_of(model)
    arguments = transformers.TrainingArguments(**options(folder))
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    trainer.evaluate()
    return model, before


def of_sentence_transformers(
    cached: bool, folder: Path, processes: int
) -> tuple[nn.Module, Weights]:
    library = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets")
    from sentence_transformers.models import Pooling, Transformer

    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = Transformer(str(folder / "bert"), config_args=no_dropout)
    model = library.SentenceTransformer(modules=[bert, Pooling(16)], device="cpu")
    before = weights_of(model)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model  # the trainer replaces it by the wrapped model
            self.clip = ClipLoss()
            self.step = GradientCache((self.encode, self.encode), self.score, 2)

        def encode(self, features: dict[str, Any]) -> Tensor:
            embedding: Tensor = self.model(dict(features))["sentence_embedding"]
            return embedding

        def score(self, x: Tensor, y: Tensor) -> Tensor:
            return self.clip(F.normalize(x), F.normalize(y), 20.0)

        def forward(self, sentence_features: Any, labels: Any = None) -> Tensor:
            features = list(sentence_features)
            return self.step(*features) if cached else self.score(*map(self.encode, features))

    letters = [LETTERS[i % 8] + " " + LETTERS[i // 8] for i in range(SAMPLES)]
    data = datasets.Dataset.from_dict(
        {"anchor": letters, "positive": [f"{pair} h" for pair in letters]}
    )
    arguments = library.SentenceTransformerTrainingArguments(**options(folder))
    trainer = library.SentenceTransformerTrainer(
        model, arguments, train_dataset=data, eval_dataset=data, loss=Loss()
    )
    trainer.train()
    trainer.evaluate()
    return model, before


def weights_of(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def compare(library: str, folder: Path, processes: int = 1) -> None:
    train = globals()[f"of_{library}"]
    (plain, _), (cached, before) = (train(how, folder, processes) for how in (False, True))
    assert all(parameter.grad is None for parameter in cached.parameters())
    expected, found = weights_of(plain), weights_of(cached)
    moved = max((found[name] - before[name]).abs().max().item() for name in before)
    assert moved > 1e-2  # four steps of 1e-2, two on two processes
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def import_and_fork(folder: Path, ports: list[int]) -> None:
    """Import the libraries, which takes seconds, then fork one process alone and a group of two."""
    for name in (*LIBRARIES, "accelerate", "datasets"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    context: Any = multiprocessing.get_context("fork")
    ranks = [("alone", 0, 1), ("0", 0, 2), ("1", 1, 2)]
    started = [context.Process(target=worker, args=(*rank, folder, ports)) for rank in ranks]
    for process in started:
        process.start()
    for process in started:
        process.join()


def worker(name: str, rank: int, size: int, folder: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    if size > 1:
        pretend_torchrun(rank, size)
    outcome = {}
    for library, port in zip(LIBRARIES, ports, strict=True):
        if size > 1:
            os.environ["MASTER_PORT"] = str(port)
        try:
            compare(library, folder, size)
            outcome[library] = ""
        except (Exception, pytest.skip.Exception):
            outcome[library] = traceback.format_exc()
        (folder / f"{name}.json").write_text(json.dumps(outcome))
    if dist.is_initialized():
        leave()


def pretend_torchrun(rank: int, size: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
        # Like torchrun, with a store at a free port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The result of each library's training, in each process."""
    folder = tmp_path_factory.mktemp("trainers")
    save_tiny_bert(folder / "bert")
    stores = [new_store() for _ in LIBRARIES]  # a store keeps the keys of an earlier group
    process = forked(import_and_fork, folder, [store.port for store in stores])
    process.join(240)
    process.kill()
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return {name: found.get(name, {}) for name in ("alone", "0", "1")}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("processes", [1, 2])
def test_training_is_as_without_a_cache(
    processes: int, library: str, outcomes: dict[str, dict[str, str]]
) -> None:
    for name in ["alone"] if processes == 1 else ["0", "1"]:
        failure = outcomes[name].get(library, "it did not end")
        if "Skipped: could not import" in failure:
            pytest.skip(failure.splitlines()[-1])
        assert not failure, f"process {name}: {failure}"
