"""The model of a run: locked and fit for its loss and data, or refused with the reason."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megabatch.errors import UsageError
from megabatch.models.locking import locked_towers
from megabatch.training import TrainConfig
from megabatch.training.setup import kind_problems
from megabatch.training.towers import build_towers
from tests.models.tiny import TINY


def built(**changes: Any) -> Any:
    return build_towers(TrainConfig(**{"model": TINY, **changes})).module


def test_locked_towers_are_the_configurations() -> None:
    assert locked_towers(built(lock_image=True)) == {"image"}
    assert locked_towers(built(lock_text=True)) == {"text"}
    assert locked_towers(built(lock_text=True, lock_text_unlocked_layers=1)) == set()


@pytest.mark.parametrize("model", [TINY, "glyph-small"])
def test_siglip_starts_as_published_unless_told(model: str) -> None:
    module = built(model=model, loss="siglip")
    assert module.logit_scale.item() == pytest.approx(math.log(10))
    assert module.logit_bias.item() == -10
    assert module.logit_bias.requires_grad
    module = built(model=model, loss="siglip", init_logit_scale=1.0, init_logit_bias=-2.0)
    assert (module.logit_scale.item(), module.logit_bias.item()) == (1, -2)


@pytest.mark.parametrize("model", [TINY, "glyph-small"])
def test_a_bias_that_no_loss_looks_at_is_not_trained(model: str) -> None:
    assert not built(model=model, init_logit_bias=-10.0).logit_bias.requires_grad
    assert built(model=model).logit_bias is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model": "glyph-small", "layer_decay": 0.5},
            "--layer-decay: glyph-small has no numbered",
        ),
        ({"matryoshka_dims": (8, 17)}, "--matryoshka-dims 17: the features of .* only 16"),
        (
            {"lock_image": True, "lock_image_unlocked_groups": 50},
            "--lock-image: with 50 groups unlocked nothing of the image tower stays locked",
        ),
        (
            {"model": "glyph-small", "lock_image": True, "lock_image_unlocked_groups": 1},
            "--lock-image: .*locked whole only, got 1 unlocked",
        ),
        (
            {"model": "glyph-small", "force_image_size": 64},
            "--force-image-size: glyph-small has no",
        ),
        ({"hf_pooling": "cls"}, "is no 'hf:' model"),
    ],
)
def test_what_a_model_cannot_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        built(**changes)


def test_data_that_a_model_does_not_take_are_refused() -> None:
    config = TrainConfig(model="hf:folder", train_data="shards")
    assert kind_problems(config, "image", "image") == []
    [problem] = kind_problems(config, "image", "text")
    assert problem.startswith("--model hf:folder: it takes texts with texts, but shards has images")
