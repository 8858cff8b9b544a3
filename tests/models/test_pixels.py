"""Images travel as bytes; a tower computes the same from them as from normalised images."""

from __future__ import annotations

import copy
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import ColorJitter, Compose, Normalize, Resize, ToTensor

from megabatch.models import create
from megabatch.models.pixels import Normalization, PixelNormalization, with_bytes
from tests.models.tiny import TINY

MEAN, STD = (0.48, 0.45, 0.40), (0.27, 0.26, 0.28)


class Tower(nn.Module):
    """Returns its input."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image


def picture(mode: str = "RGB") -> Image.Image:
    pixels = torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK"])
def test_features_are_those_of_normalised_images_bit_for_bit(mode: str) -> None:
    towers = create(TINY)
    theirs, train, evaluation = open_clip.create_model_and_transforms(TINY)
    theirs.load_state_dict(towers.module.state_dict())
    theirs.eval()  # patches are dropped in training
    towers.module.eval()
    for own, expected in ((towers.train_transform, train), (towers.eval_transform, evaluation)):
        torch.manual_seed(1)  # of the picture and its crop
        pixels = torch.stack([own(picture(mode))])
        torch.manual_seed(1)
        normalised = torch.stack([expected(picture(mode))])
        assert pixels.dtype == torch.uint8
        assert pixels.shape == normalised.shape
        features = theirs.encode_image(normalised)
        assert torch.equal(towers.module.encode_image(pixels), features)
        assert torch.equal(towers.module.encode_image(normalised), features)


def test_the_order_of_bytes_in_memory_changes_nothing() -> None:
    normalize = PixelNormalization(Normalization((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    pixels = torch.randint(256, (2, 3, 5, 4), dtype=torch.uint8)
    last = normalize(pixels.to(memory_format=torch.channels_last))
    assert last.is_contiguous()
    assert torch.equal(last, normalize(pixels))


def test_names_of_weights_and_copies_stay() -> None:
    module = create(TINY).module.eval()
    assert module.state_dict().keys() == open_clip.create_model(TINY).state_dict().keys()
    assert isinstance(module.visual, type(open_clip.create_model(TINY).visual))
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(copy.deepcopy(module).encode_image(pixels), module.encode_image(pixels))


def ending(*last: Any) -> Compose:
    return Compose([Resize(8), *last])


@pytest.mark.parametrize(
    "transforms",
    [
        (ending(ToTensor(), Normalize(MEAN, STD)), ending(ToTensor(), Normalize(MEAN, MEAN))),
        (ending(ToTensor()), ending(ToTensor())),
        (ending(ToTensor(), Normalize(MEAN, STD), ColorJitter()),) * 2,
        (ToTensor(), ToTensor()),
        (Compose([]), Compose([])),
    ],
)
def test_other_transforms_stay_as_they_are(transforms: tuple[Any, Any]) -> None:
    tower = Tower()
    assert with_bytes(tower, *transforms) == transforms
    assert type(tower) is Tower
    pixels = torch.ones(1, 3, 2, 2, dtype=torch.uint8)
    assert tower(pixels) is pixels


def test_the_device_normalises() -> None:
    tower = Tower()
    transform = ending(ToTensor(), Normalize(MEAN, STD))
    own, _ = with_bytes(tower, transform, transform)
    image = picture()
    assert torch.equal(tower(own(image)[None])[0], transform(image))
    assert tower.to("meta")(torch.empty(1, 3, 2, 2, dtype=torch.uint8, device="meta")).is_meta
