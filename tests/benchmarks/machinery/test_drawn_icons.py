from __future__ import annotations

import open_clip
import torch

from machinery.drawn_icons import CONTRAST, SMALLEST, drawn, towers
from tests.models.tiny import TINY


def icons(n: int) -> torch.Tensor:
    """White, with a black square of half the side in the middle."""
    made = torch.full((n, 1, 8, 8), 255, dtype=torch.uint8)
    made[:, :, 2:6, 2:6] = 0
    return made


def test_icons_have_a_size_a_place_and_two_colours() -> None:
    torch.manual_seed(0)
    side = 80
    pictures = drawn(icons(20), side)
    assert (pictures.dtype, pictures.shape) == (torch.uint8, (20, 3, side, side))
    places, grounds = set(), set()
    for picture in pictures.float():
        ground = picture[:, 0, 0]
        ink = (picture - ground[:, None, None]).abs().amax(0) > 255 * CONTRAST / 2
        rows, columns = ink.any(1).nonzero().squeeze(1), ink.any(0).nonzero().squeeze(1)
        sides = [len(rows), len(columns)]
        assert side * SMALLEST / 2 - 2 <= min(sides) <= side / 2 + 4
        assert abs(sides[0] - sides[1]) <= 2
        middle = picture[:, rows[len(rows) // 2], columns[len(columns) // 2]]
        assert ((middle - ground).abs() >= 255 * CONTRAST - 2).all()
        places.add((int(rows[0]), int(columns[0]), sides[0]))
        grounds.add(tuple(ground.tolist()))
    assert len(places) > 15
    assert len(grounds) == 20


def test_the_same_state_of_the_generator_draws_the_same() -> None:
    torch.manual_seed(1)
    first = drawn(icons(3), 16)
    torch.manual_seed(1)
    assert torch.equal(first, drawn(icons(3), 16))
    assert not torch.equal(first, drawn(icons(3), 16))


def test_an_open_clip_model_encodes_icons() -> None:
    made = towers(TINY, 8)
    made.module.eval()
    plain = open_clip.create_model(TINY).eval()
    plain.load_state_dict(made.module.state_dict())
    torch.manual_seed(2)
    features = made.module.encode_image(icons(3))
    torch.manual_seed(2)
    side = plain.visual.image_size
    pictures = drawn(icons(3), side if isinstance(side, int) else side[0])
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in (plain.visual.image_mean, plain.visual.image_std)
    )
    expected = plain.encode_image((pictures.float() / 255 - mean) / std)
    assert torch.allclose(features, expected, atol=1e-5)
