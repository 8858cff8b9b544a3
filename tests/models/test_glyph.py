"""glyph-small and its tokenizer."""

from __future__ import annotations

import math
import pickle
import zlib

import pytest
import torch
from PIL import Image

from megabatch.models import Towers, create
from megabatch.models.glyph import GlyphTransform, HashingTokenizer, features


@pytest.fixture(scope="module")
def towers() -> Towers:
    torch.manual_seed(0)
    return create("glyph-small")


def test_features_are_normalised_and_the_scale_starts_as_openclips(towers: Towers) -> None:
    images = torch.randint(0, 256, (3, 1, 32, 32), dtype=torch.uint8)
    texts = towers.tokenizer(["latin small letter a", "digit one", "sun"])
    outputs = towers.module(images, texts)
    assert outputs.keys() == {"image_features", "text_features", "logit_scale"}
    for key in ("image_features", "text_features"):
        assert outputs[key].shape == (3, towers.embed_dim)
        torch.testing.assert_close(outputs[key].norm(dim=-1), torch.ones(3))
    assert outputs["logit_scale"].item() == pytest.approx(1 / 0.07)
    assert towers.module.logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    for part in (towers.train_transform, towers.eval_transform, towers.tokenizer):
        pickle.loads(pickle.dumps(part))  # workers get them
    # Features depend on no other image.
    alone = towers.module.encode_image(images[2:3], normalize=True)
    torch.testing.assert_close(outputs["image_features"][2:3], alone)


@pytest.mark.parametrize("shape", [(1, 32, 32), (1, 48, 20), (3, 32, 32)])
def test_the_batched_transform_is_the_single_one(shape: tuple[int, int, int]) -> None:
    transform = GlyphTransform()
    arrays = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    images = [Image.fromarray(a.permute(1, 2, 0).squeeze(-1).numpy()) for a in arrays]
    batched = transform.batch(arrays, torch.zeros(2, dtype=torch.int64))
    assert batched.dtype == torch.uint8
    assert torch.equal(batched, torch.stack([transform(image) for image in images]))


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "P", "I;16"])
def test_pictures_of_any_mode_keep_their_proportions_with_black_around(mode: str) -> None:
    pixels = GlyphTransform()(Image.new(mode, (64, 32), "white" if mode[0] != "I" else 255))
    assert pixels.dtype == torch.uint8
    rows = torch.arange(32).view(1, 32, 1).expand(1, 32, 32)
    assert torch.equal(pixels > 0, (rows >= 8) & (rows < 24))


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


tokenizer = HashingTokenizer()


def test_words_then_pairs_then_trigrams() -> None:
    assert features("Letter EL-2") == [
        *("letter", "el", "2"),
        *("^ letter", "letter el", "el 2", "2 $"),
        *("<^le", "<let", "<ett", "<tte", "<ter", "<er$", "<^el", "<el$"),
    ]


def test_tokens_are_the_same_in_every_process() -> None:
    # Not Python's hash(), which is salted. These numbers must never change: weights depend on them.
    assert tokenizer("el")[0, :5].tolist() == [5583, 3417, 512, 11661, 5488]
    assert tokenizer(["abc", "de"]).shape == (2, 64)
    assert tokenizer([]).shape == (0, 64)
    assert features("---") == ["^ $"]  # a text without words has one token


def test_tokens_are_the_features_hashes() -> None:
    texts = ["", "ab é-1,²İß\U0001f600 \n", "a", "ab ab ab ab"]
    for length in (1, 5, 80):
        for text, row in zip(texts, HashingTokenizer(1000, length)(texts).tolist(), strict=True):
            hashes = [zlib.crc32(feature.encode()) % 999 + 1 for feature in features(text)][:length]
            assert row == hashes + [0] * (length - len(hashes))
