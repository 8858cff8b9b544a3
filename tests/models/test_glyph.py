"""glyph-small: inputs and outputs."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from megabatch.data import GlyphPairs, load_glyphs
from megabatch.errors import UsageError
from megabatch.models import Towers, create
from megabatch.models.glyph import GlyphTransform


@pytest.fixture(scope="module")
def towers() -> Towers:
    torch.manual_seed(0)
    return create("glyph-small")


@pytest.fixture(scope="module")
def pairs() -> GlyphPairs:
    return load_glyphs().split("train")


def test_features_are_normalised_and_the_scale_starts_as_openclips(
    towers: Towers, pairs: GlyphPairs
) -> None:
    some = [pairs[i] for i in range(0, 1000, 100)]
    images = torch.stack([towers.eval_transform(pair.image) for pair in some])
    texts = towers.tokenizer([pair.caption for pair in some])
    outputs = towers.module(images, texts)
    assert outputs.keys() == {"image_features", "text_features", "logit_scale"}
    for key in ("image_features", "text_features"):
        assert outputs[key].shape == (10, towers.embed_dim)
        torch.testing.assert_close(outputs[key].norm(dim=-1), torch.ones(10))
    assert outputs["logit_scale"].item() == pytest.approx(1 / 0.07)
    assert towers.module.logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    torch.testing.assert_close(
        towers.module.encode_image(images, normalize=True), outputs["image_features"]
    )
    unnormalised = towers.module.encode_text(texts)
    assert not torch.allclose(unnormalised.norm(dim=-1), torch.ones(10))


def test_the_same_seed_gives_the_same_weights(towers: Towers) -> None:
    torch.manual_seed(0)
    again = create("glyph-small").module.state_dict()
    assert all(
        torch.equal(value, again[name]) for name, value in towers.module.state_dict().items()
    )


def test_an_images_features_depend_on_no_other_image(towers: Towers, pairs: GlyphPairs) -> None:
    images = torch.stack([towers.eval_transform(pairs[i].image) for i in range(6)])
    together = towers.module.encode_image(images)
    torch.testing.assert_close(together[2:3], towers.module.encode_image(images[2:3]))


def test_single_and_batched_transforms_give_the_same(pairs: GlyphPairs) -> None:
    transform = GlyphTransform()
    indices = np.arange(5)
    arrays = torch.from_numpy(pairs.arrays(indices))
    batched = transform.batch(arrays, torch.zeros(5, dtype=torch.int64))
    single = torch.stack([transform(pairs[i].image) for i in indices])
    assert batched.dtype == torch.uint8
    assert torch.equal(batched, single)


@pytest.mark.parametrize("shape", [(1, 48, 20), (3, 32, 32)])
def test_the_batched_transform_takes_other_shapes_as_the_single_one_does(
    shape: tuple[int, int, int],
) -> None:
    transform = GlyphTransform()
    arrays = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    pictures = [Image.fromarray(a.permute(1, 2, 0).squeeze(-1).numpy()) for a in arrays]
    batched = transform.batch(arrays, torch.zeros(2, dtype=torch.int64))
    assert torch.equal(batched, torch.stack([transform(p) for p in pictures]))


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "P", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (40, 10), (300, 200)])
def test_pictures_of_any_mode_and_size_are_taken(mode: str, size: tuple[int, int]) -> None:
    pixels = GlyphTransform()(Image.new(mode, size))
    assert pixels.shape == (1, 32, 32)
    assert pixels.dtype == torch.uint8


def test_proportions_are_kept_with_black_around() -> None:
    pixels = GlyphTransform()(Image.new("L", (64, 32), 255))[0]
    assert (pixels[8:24] == 255).all()
    assert (pixels[:8] == 0).all()
    assert (pixels[24:] == 0).all()


def test_strides_of_the_batch_do_not_matter_to_the_layout_inside(towers: Towers) -> None:
    images = torch.randint(0, 256, (4, 32, 32), dtype=torch.uint8)
    odd = images.unsqueeze(-1).permute(0, 3, 1, 2)  # strides (1024, 1, 32, 1)
    seen: list[bool] = []
    hook = towers.module.visual.stem[0].register_forward_hook(
        lambda module, inputs, output: seen.append(output.is_contiguous())
    )
    towers.module.encode_image(odd)
    hook.remove()
    assert seen == [True]  # channels-last would be slow, not wrong: nothing else would show it


def test_transform_and_tokenizer_can_be_sent_to_workers(towers: Towers) -> None:
    for part in (towers.train_transform, towers.eval_transform, towers.tokenizer):
        pickle.loads(pickle.dumps(part))


def test_weights_come_back_from_a_file_and_those_of_another_model_are_refused(
    towers: Towers, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(towers.module.state_dict(), path)
    again = create("glyph-small", pretrained=path).module.state_dict()
    assert all(
        torch.equal(value, again[name]) for name, value in towers.module.state_dict().items()
    )
    save_file({"other": torch.zeros(3)}, path)
    with pytest.raises(UsageError, match="does not hold the weights of glyph-small"):
        create("glyph-small", pretrained=path)
