"""An open_clip model that draws each icon on the device: in another place, size and colours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from machinery.icon_towers import GreyTransform
from megabatch.models import Towers, create

SMALLEST = 0.4  # side of a drawn icon, of the picture's
CONTRAST = 0.35  # least difference of ink and background, in each channel


def towers(name: str, size: int) -> Towers:
    """An open_clip model whose images are grey icons, uint8 (n, 1, size, size).

    A million of its pictures would take 150 GB on the host; a million icons of 32 pixels take 1 GB.
    """
    made = create(name)
    visual: Any = made.module.visual
    own = type(visual)
    visual.__class__ = type(own.__name__, (_Draws, own), {"__module__": own.__module__})
    transform = GreyTransform(size)
    return replace(made, train_transform=transform, eval_transform=transform)


class _Draws(nn.Module):
    """An image tower that makes pictures of icons itself."""

    image_size: int | tuple[int, int]

    def forward(self, image: Tensor) -> Any:
        """The tower's own output, of icons as `drawn` takes them."""
        size = self.image_size
        return super().forward(drawn(image, size if isinstance(size, int) else size[0]))


@torch.no_grad()
def drawn(icons: Tensor, side: int) -> Tensor:
    """Pictures of grey icons, each with a random size, place, background and colour of the ink.

    Args:
        icons: uint8 (n, 1, height, width), black on white.
        side: of a picture, in pixels.

    Returns:
        uint8 (n, 3, side, side).
    """
    n, device = len(icons), icons.device
    size = SMALLEST + (1 - SMALLEST) * torch.rand(n, 1, device=device)
    centres = (torch.arange(side, device=device) * 2 + 1) / side - 1
    shift = (torch.rand(2, n, 1, device=device) * 2 - 1) * (1 - size)
    across, along = ((centres - moved) / size for moved in shift)  # in an icon, from -1 to 1
    places = torch.stack(
        [across[:, None, :].expand(n, side, side), along[:, :, None].expand(n, side, side)], dim=-1
    )
    ink = F.grid_sample(1 - icons.float() / 255, places, align_corners=False).squeeze(1)
    background = torch.rand(n, 3, device=device)
    far = CONTRAST + (1 - 2 * CONTRAST) * torch.rand(n, 3, device=device)
    change = (background + far) % 1 - background
    pictures = torch.empty(n, 3, side, side, dtype=torch.uint8, device=device)
    for channel in range(3):  # one at a time: all in floats would be four times as large
        first, more = (colours[:, channel, None, None] for colours in (background, change))
        pictures[:, channel] = torch.addcmul(first, ink, more).mul_(255).round_()
    return pictures
