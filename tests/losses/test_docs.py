"""The pages about losses: their examples run, and their tables are those of the registry."""

from __future__ import annotations

import inspect
import re

import pytest

import megabatch as mb
from megabatch import losses
from megabatch.losses.registry import TRAINABLE
from tests.docs.pages import ROOT, blocks

DOCS = ROOT / "docs"


def test_the_new_loss_is_short_and_equals_its_dense_expression() -> None:
    loss, check = blocks("docs/new-loss.md", "python")
    assert len([line for line in loss.splitlines() if line.strip()]) < 30
    names: dict[str, object] = {}
    exec(loss, names)
    exec(check, names)  # raises where gradients differ
    worse = check.replace("dense(*theirs, 10.0", "dense(*theirs, 10.01")
    with pytest.raises(AssertionError):
        exec(worse, names)


def test_every_loss_has_its_section_and_its_place_in_the_table() -> None:
    """The table has the trainer's options, and the papers that the sources name."""
    page = (DOCS / "losses.md").read_text()
    options = {entry.name: f"`{option}`" for option, entry in TRAINABLE.items()}
    assert {*options} <= {*losses.__all__}
    for name in losses.__all__:
        loss = getattr(losses, name)
        assert getattr(mb, name) is loss
        assert re.search(rf"^## {name}$", page, re.M)
        start = re.escape(f"[`{name}`](#{name.lower()})")
        (row,) = re.findall(rf"^\| [^|]+ \| {start}.*$", page, re.M)
        *_, option, paper, _ = (cell.strip() for cell in row.split("|"))
        assert option == options.get(name, "")
        number = re.search(r"\[(.*)\]\(https://arxiv.org/abs/\1\)", paper)
        assert number is not None
        assert f"arXiv {number[1]}" in inspect.getsource(inspect.getmodule(loss)).replace("\n", " ")


def test_the_table_of_recipes_is_the_registrys() -> None:
    page = (DOCS / "recipes.md").read_text()
    for option, entry in TRAINABLE.items():
        settings = " ".join(f"`--{name.replace('_', '-')}`" for name in entry.settings)
        cells = f"`{option}`", ", ".join(entry.duplicates), settings
        assert f"\n| {' | '.join(cells)} |\n".replace("|  |", "| |") in page, option


def test_gradient_caching_of_several_modalities_as_shown() -> None:
    import torch
    from torch import Tensor, nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleDict({n: nn.Linear(4, 3) for n in ("image", "text", "audio")})
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            features = {name: self.towers[name](value) for name, value in batch.items()}
            return {**features, "logit_scale": self.scale.exp()}

    model = Model()
    names = {"mb": mb, "model": model}
    *others, shown = blocks("docs/losses.md", "python")
    for code in others:
        exec(code, {})
    exec(shown, names)
    batch = {name: torch.randn(6, 4) for name in ("image", "text", "audio")}
    value = names["step"](batch)  # type: ignore[operator]
    features = model(batch)
    scale = features.pop("logit_scale")
    torch.testing.assert_close(value.detach(), names["loss"](features, scale).detach())  # type: ignore[operator]
    value.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
