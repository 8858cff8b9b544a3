"""icon-small: inputs and outputs."""

from __future__ import annotations

import pickle

import pytest
import torch
from PIL import Image

from machinery.icon_towers import NAME, GreyTransform
from megabatch.errors import UsageError
from megabatch.models import ModelOptions, Towers, create


@pytest.fixture(scope="module")
def towers() -> Towers:
    torch.manual_seed(0)
    return create(NAME)


def pictures(n: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (n, 1, 64, 64), dtype=torch.uint8, generator=noise)


def test_training_is_random_by_torchs_generator_and_evaluation_is_not(towers: Towers) -> None:
    module, images = towers.module, pictures(2)
    module.eval()
    features = module.encode_image(images)
    assert features.shape == (2, towers.embed_dim)
    assert torch.equal(module.encode_image(images), features)
    torch.testing.assert_close(module.encode_image(images[1:]), features[1:])  # of each alone
    module.train()
    seen = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        seen.append(module.encode_image(images))
    assert torch.equal(seen[0], seen[1])
    assert not torch.allclose(seen[0], seen[2])


def test_pictures_of_any_kind_become_grey_on_white() -> None:
    transform = GreyTransform()
    for mode in ("1", "L", "LA", "RGB", "RGBA", "P"):
        pixels = transform(Image.new(mode, (40, 10)))
        assert (pixels.shape, pixels.dtype) == ((1, 64, 64), torch.uint8)
        assert (pixels[0, 0] == 255).all()  # around what is wider than high
    clear = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    assert (transform(clear) == 255).all()
    batched = transform.batch(pictures(2), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(batched, pictures(2))
    wide = torch.zeros(2, 3, 8, 16, dtype=torch.uint8)
    assert torch.equal(
        transform.batch(wide, torch.zeros(2, dtype=torch.int64))[1],
        transform(Image.new("RGB", (16, 8))),
    )
    pickle.loads(pickle.dumps(transform))


def test_options() -> None:
    smaller = create(NAME, options=ModelOptions(force_image_size=32, init_logit_bias=-10.0))
    assert smaller.eval_transform(Image.new("L", (64, 64))).shape == (1, 32, 32)
    assert smaller.module.visual.pos_embed.shape[0] == 16
    assert smaller.module.logit_bias.item() == -10
    with pytest.raises(UsageError, match="multiples of 8"):
        create(NAME, options=ModelOptions(force_image_size=60))
    with pytest.raises(UsageError, match="--hf-share: icon-small has no such option"):
        create(NAME, options=ModelOptions(hf_share=False))
