"""The Python blocks of every page run as shown, one after another with the same names.

A page's function below gives the names that its blocks take as known, small ones, and checks what
came out. Pages whose blocks have a test of their own, with several processes or with commands in
between, are listed in ELSEWHERE. Only these changes are made to what a page shows:
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from tests.docs.pages import PAGES, ROOT, blocks, languages
from tests.integrations.conftest import _new_accelerator  # noqa: F401  # a fixture
from tests.models.tiny_bert import save_tiny_bert

CHANGES = {
    r" = \.\.\.$": " = parts()",  # the reader's own modules
    r'device="cuda"': 'device="cpu"',
    r"torch\.cuda\.make_graphed_callables": "called_once",  # it needs a GPU
}

ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "docs/distributed.md": "tests/test_distributed_docs.py",
    "docs/evaluation.md": "tests/evaluation/test_docs.py",
    "docs/export.md": "tests/export/test_run.py",
    "docs/integrations/any-loop.md": "tests/test_distributed_docs.py",
    "docs/losses.md": "tests/losses/test_docs.py",
    "docs/new-loss.md": "tests/losses/test_docs.py",
    "docs/recipes.md": "tests/training/test_own_parts.py",
}

Names = dict[str, Any]


#: By page, a function of a temporary folder.
HERE: dict[str, Callable[[Path], Iterator[Names]]] = {}


def page(name: str) -> Callable[..., Any]:
    """A generator of this page: yields the names its blocks need, then checks them."""
    return lambda function: HERE.setdefault(f"docs/{name}", function)


class Texts(nn.EmbeddingBag):
    def forward(self, batch: Tensor | Names) -> Tensor:  # type: ignore[override]
        return super().forward(batch["input_ids"] if isinstance(batch, dict) else batch)


def towers() -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8)), Texts(20, 8)


def batches() -> tuple[Tensor, Tensor]:
    """12 images, and texts of 6 tokens with padding on the right."""
    texts = torch.randint(1, 19, (12, 6))
    texts[torch.arange(12), torch.arange(12) % 5 + 1] = 19  # the end of a text
    return torch.randn(12, 3, 2, 2), texts


def clip_loss(x: Tensor, y: Tensor) -> Tensor:
    return mb.ClipLoss()(F.normalize(x), F.normalize(y), 10.0)


@page("gradient-caching.md")
def gradient_caching(folder: Path) -> Iterator[Names]:
    lightning = pytest.importorskip("lightning")
    (image, text), (images, texts) = towers(), batches()
    optimizer = torch.optim.SGD([*image.parameters(), *text.parameters()], lr=0.1)
    before = copy.deepcopy(image.state_dict())
    tokenized = {"input_ids": texts, "attention_mask": texts > 0}
    known: Names = {
        **{"mb": mb, "nn": nn, "F": F, "lightning": lightning, "loss": clip_loss},
        **{"image_encoder": image, "text_encoder": text, "optimizer": optimizer},
        **{"images": images, "texts": texts, "tokens": texts},
        **{"batch": tokenized, "parts": towers, "encode": lambda batch: text(batch["input_ids"])},
        **dict.fromkeys(("queries", "passages", "captions"), tokenized),
    }
    yield known
    assert not torch.equal(before["1.weight"], image.state_dict()["1.weight"])

    module = known["Module"]()
    module.cache.loss = clip_loss
    module.training_step((images, texts)).backward()
    model = known["Model"]()
    model.cache = mb.GradientCache((image, text), clip_loss, 4)
    model(images, texts)["loss"].backward()

    class Sentences(Texts):
        def forward(self, features: Names) -> Names:  # type: ignore[override]
            return {"sentence_embedding": super().forward(features)}

    sentences = Sentences(20, 8)
    known["Loss"](sentences)([{"input_ids": texts}, {"input_ids": texts.flip(1)}]).backward()
    assert sentences.weight.grad is not None


@page("late-interaction.md")
def late_interaction_page(folder: Path) -> Iterator[Names]:
    known: Names = {}
    yield known
    assert known["queries"].grad.any()
    assert known["encoder"].words.weight.grad.any()


@page("memory.md")
def memory(folder: Path) -> Iterator[Names]:
    images, texts = batches()
    model = nn.ModuleList(towers())
    known: Names = {
        **{"mb": mb, "torch": torch, "Tensor": Tensor, "texts": texts, "loss": clip_loss},
        "files": [image.numpy().tobytes() for image in images],
        "decode": lambda f: torch.frombuffer(bytearray(f), dtype=torch.float32).reshape(3, 2, 2),
        "model": lambda x, y: (model[0](x), model[1](y)),
    }
    yield known
    expected = clip_loss(model[0](images), model[1](texts))
    torch.testing.assert_close(known["value"].detach(), expected.detach())


@page("faq.md")
def faq(folder: Path) -> Iterator[Names]:
    x, y = (F.normalize(torch.randn(6, 4)) for _ in range(2))
    known: Names = {"mb": mb, "image_features": x, "text_features": y}
    known["called_once"] = lambda function, sample: function(*sample)
    known["logit_scale"] = torch.tensor(10.0)
    yield known
    torch.testing.assert_close(known["graphed"], mb.ClipLoss()(x, y, 10.0))


@page("integrations/lightly.md")
def lightly(folder: Path) -> Iterator[Names]:
    pytest.importorskip("lightly")
    model = nn.Linear(6, 4)
    known: Names = {"mb": mb, "model": model, "view0": torch.randn(8, 6)}
    known["view1"] = known["view0"] + 0.1 * torch.randn(8, 6)
    yield known
    assert known["criterion"].__module__ == "megabatch.integrations.lightly"
    assert known["loss"].ndim == 0
    assert model.weight.grad is not None


@page("integrations/late_interaction.md")
def late_interaction(folder: Path) -> Iterator[Names]:
    known: Names = {"mb": mb, "model": nn.Linear(2, 2), "ContrastiveTrainer": nn.Module}
    yield known
    trainer, tokens = known["Trainer"](), F.normalize(torch.randn(2, 4, 3, 5), dim=3)
    trainer.loss_func = known["loss_func"]
    value = trainer._compute_loss_from_outputs(*tokens)
    torch.testing.assert_close(value, known["ColbertLoss"]()(*tokens))


@page("integrations/lightning.md")
def lightning(folder: Path) -> Iterator[Names]:
    library = pytest.importorskip("lightning")
    image, text = towers()
    scale = nn.Parameter(torch.tensor(2.0))
    known: Names = {"mb": mb, "torch": torch, "F": F, "lightning": library}
    known["parts"] = lambda: (image, text, scale)
    yield known
    images, texts = batches()
    after = known["Pairs"]()
    x, y = (encode(batch) for encode, batch in zip(after.encoders(), (images, texts), strict=True))
    value = after.contrastive_loss(x, y)
    before: Names = dict(known)
    exec(with_changes(blocks("docs/integrations/lightning.md", "python")[0]), before)
    plain = before["Pairs"]().training_step((images, texts), 0)
    torch.testing.assert_close(value, plain)


@page("integrations/pytorch_metric_learning.md")
def pytorch_metric_learning(folder: Path) -> Iterator[Names]:
    pytest.importorskip("pytorch_metric_learning")
    known: Names = {"embeddings": torch.randn(12, 5), "labels": torch.arange(12) // 3}
    yield known
    theirs: Names = dict(known)
    first = blocks("docs/integrations/pytorch_metric_learning.md", "python")[0]
    exec("\n".join(line for line in first.splitlines() if "# after" not in line), theirs)
    assert theirs["loss_func"].__module__ != known["loss_func"].__module__
    torch.testing.assert_close(known["loss"], theirs["loss"])


@page("integrations/sentence_transformers.md")
def sentence_transformers(folder: Path) -> Iterator[Names]:
    library = pytest.importorskip("sentence_transformers", minversion="6.0")
    pytest.importorskip("accelerate")
    datasets = pytest.importorskip("datasets")
    model = library.SentenceTransformer(str(save_tiny_bert(folder)), device="cpu")
    encoder = library.MultiVectorEncoder(str(folder), device="cpu")
    arguments = library.MultiVectorEncoderTrainingArguments(
        str(folder / "run"), max_steps=1, use_cpu=True, report_to="none", save_strategy="no"
    )
    texts = {"question": ["a b", "c", "d e"], "answer": ["a", "c d", "e"]}
    known: Names = {"model": model.eval(), "encoder": encoder, "arguments": arguments}
    known["questions"] = datasets.Dataset.from_dict(texts)
    yield known
    assert known["trainer"].state.global_step == 1
    assert isinstance(known["loss"], known["losses"].CachedMultipleNegativesRankingLoss)
    assert type(known["loss"]).__name__ == "MegabatchRankingLoss"


@page("integrations/transformers.md")
def transformers(folder: Path) -> Iterator[Names]:
    pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    from tests.integrations import hf

    clip, rows = hf.model_of("clip"), hf.rows_of(hf.images_and_texts(8))
    before = copy.deepcopy(clip.state_dict())
    known: Names = {
        **{"mb": mb, "clip": clip, "bert": hf.bert(), "Trainer": hf.transformers.Trainer},
        **{"pairs": rows, "arguments": hf.arguments(folder, remove_unused_columns=False)},
        "collate": lambda some: {k: v for k, v in hf.collate(some).items() if k != "return_loss"},
        "collate_pairs": hf.collate_pairs,
        "optimizer": torch.optim.SGD(clip.parameters(), lr=0.1),
    }
    known["loader"] = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=known["collate"])

    def accelerator(**words: Any) -> Any:
        """As in a program that has made no Trainer before."""
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return accelerate.Accelerator(cpu=True, **words)

    known["Accelerator"] = accelerator
    yield known
    assert type(known["trainer"]).__name__ == "MegabatchTrainer"
    after = clip.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def with_changes(code: str) -> str:
    for shown, run in CHANGES.items():
        code = re.sub(shown, run, code, flags=re.M)
    return code


@pytest.mark.parametrize("name", HERE)
def test_blocks_run_as_shown(name: str, tmp_path: Path) -> None:
    shown = blocks(name, "python")
    steps = HERE[name](tmp_path)
    names = next(steps)
    for i, code in enumerate(shown):
        exec(compile(with_changes(code), f"{name}, block {i}", "exec"), names)
    assert next(steps, None) is None


def test_every_page_with_python_has_its_test() -> None:
    assert {name for name in PAGES if blocks(name, "python")} == {*HERE, *ELSEWHERE}
    for name, test in ELSEWHERE.items():
        assert f'"{name}"' in (ROOT / test).read_text(), test


def test_every_block_names_its_language() -> None:
    known = {"python", "bash", "console", "text", "{help}", "{eval-rst}"}
    assert not {name: odd for name in PAGES if (odd := languages(name) - known)}
