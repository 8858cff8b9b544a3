"""The data sets of batch_study.py, whole in a GPU's memory, and the towers that learn them.

Icons with their captions (machinery/icons.py), a vision transformer and a bag of text features; and
pairs of texts (machinery/text_pairs.py), a transformer for both sides. In training a tower sees
another form of each sample every time: icons of other sizes, places, inks and backgrounds, texts
without some of their tokens. Without that they know the training pairs by heart after a few passes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from machinery import text_pairs
from machinery.icon_towers import Block, jittered
from megabatch.data.images import decoded
from megabatch.data.pairs import caption_id
from megabatch.data.sources import open_pairs
from megabatch.models.glyph import HashingTokenizer, TextFeatureTower

WIDTH, HEADS = 256, 4
SIDE, PATCH = 32, 8  # pixels of an icon and of a patch
BUCKETS = 16_384  # of words, pairs of words and trigrams in captions
CONTEXT = 64
HELD_OUT_PERCENT = 4
#: Of a caption's features or a text's tokens, in training.
DROPPED = {"icons": 0.5, "texts": 0.2}
#: Tokens of a pair's second text that are read.
LONGEST = 32


class Pairs(NamedTuple):
    """Pairs on one device.

    first, second: (n, ...), icons uint8 (n, 256, 2), two grey levels of 16 in a byte, or tokens,
        int32 (n, length), zero after the last.
    ids: int64 (n,), equal for pairs that are no negatives of each other.
    """

    first: Tensor
    second: Tensor
    ids: Tensor

    def rows(self, chosen: Tensor | slice) -> Pairs:
        """Some of the pairs."""
        return Pairs(*(tensor[chosen] for tensor in self))


@dataclass(frozen=True)
class StudyData:
    """A data set: pairs to train on, and those to evaluate on.

    tests: "validation", "in_domain", "unseen" (families that training never saw) and "seen"; the
        last are training pairs, chosen as `in_domain` is: their lead over it was memorised.
    """

    train: Pairs
    tests: dict[str, Pairs]


def load(name: str, file: Path, device: torch.device) -> StudyData:
    """The data set "icons" or "texts" on a device, of the file of `pack` or of draw_texts.py.

    Raises:
        OSError, KeyError: the file is missing, or another one.
    """
    with np.load(file) as arrays:
        return {"icons": _icons, "texts": _texts}[name](dict(arrays), device)


def pack(folder: Path, file: Path) -> None:
    """Write the icons that `draw_icons.py --size 32` drew into one file of 4 bits a pixel."""
    arrays: dict[str, np.ndarray] = {}
    for split in ("train", "test"):
        source = open_pairs(str(folder / split))
        samples = [source[i] for i in range(len(source))]
        ink = 15 - np.stack([np.asarray(decoded(one.image)) >> 4 for one in samples])
        captions, of = np.unique([one.caption for one in samples], return_inverse=True)
        arrays |= {
            f"{split}_ink": (ink[:, :, ::2] << 4 | ink[:, :, 1::2]).reshape(len(ink), -1),
            f"{split}_tokens": HashingTokenizer(BUCKETS, CONTEXT)(captions.tolist()).numpy(),
            f"{split}_caption": of.astype(np.int32),
            f"{split}_ids": np.array([caption_id(caption) for caption in captions]),
            # The key without its shard's name: a draw stays if other icons come or go.
            f"{split}_draws": _draws([one.key.partition(":")[2].encode() for one in samples]),
        }
        arrays[f"{split}_tokens"] = arrays[f"{split}_tokens"].astype(np.uint16)
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # numpy's stub


def _icons(arrays: dict[str, np.ndarray], device: torch.device) -> StudyData:
    def pairs(split: str) -> Pairs:
        of = arrays[f"{split}_caption"]
        tokens, ids = (arrays[f"{split}_{name}"][of] for name in ("tokens", "ids"))
        return _pairs(arrays[f"{split}_ink"], tokens, ids, device)

    rest, draws = pairs("train"), arrays["train_draws"] // HELD_OUT_PERCENT
    where = [torch.from_numpy(np.flatnonzero(draws == part)).to(device) for part in range(3)]
    train = rest.rows(torch.from_numpy(np.flatnonzero(draws >= 2)).to(device))
    validation, in_domain, seen = (rest.rows(rows) for rows in where)
    tests = {"validation": validation, "in_domain": in_domain, "unseen": pairs("test")}
    return StudyData(train, {**tests, "seen": seen})


def _texts(arrays: dict[str, np.ndarray], device: torch.device) -> StudyData:
    def pairs(split: str) -> Pairs:
        queries, documents, ids = text_pairs.split(arrays, split)
        return _pairs(queries, documents[:, :LONGEST], ids, device)

    train = pairs("train")
    names = {"validation": "validation", "in_domain": "test", "unseen": "unseen"}
    tests = {name: pairs(split) for name, split in names.items()}
    seen = train.rows(slice(0, len(tests["in_domain"].ids)))  # they are in random order
    return StudyData(train, {**tests, "seen": seen})


def _pairs(first: np.ndarray, second: np.ndarray, ids: np.ndarray, device: torch.device) -> Pairs:
    sides = [side if side.dtype == np.uint8 else side.astype(np.int32) for side in (first, second)]
    tensors = (torch.from_numpy(np.ascontiguousarray(part)) for part in (*sides, ids))
    return Pairs(*(tensor.to(device) for tensor in tensors))


def _draws(keys: Sequence[bytes]) -> np.ndarray:
    """A number from 0 to 99 for each key."""
    return np.array([zlib.crc32(key) % 100 for key in keys])


# --- towers ---------------------------------------------------------------------------------------


class IconTower(nn.Module):
    """A vision transformer (arXiv 2010.11929): pre-norm blocks, the mean over patches."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(PATCH**2, WIDTH)
        self.positions = nn.Parameter(torch.randn((SIDE // PATCH) ** 2, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, packed: Tensor) -> Tensor:
        """Features (n, 256), not normalised, of packed icons (`Pairs.first`)."""
        ink = torch.stack([packed >> 4, packed & 15], dim=-1).view(-1, 1, SIDE, SIDE) / 15
        if self.training:
            ink = in_other_colours(jittered(ink))
        along = ink.view(-1, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)
        patches = along.transpose(2, 3).reshape(len(ink), -1, PATCH**2)
        x = self.patch_embed((patches - 0.27) / 0.41)  # the icons' mean and deviation
        x = x + self.positions.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def in_other_colours(ink: Tensor) -> Tensor:
    """Icons (n, 1, side, side) with ink and background of random greys at least 0.4 apart."""
    apart = 0.4 + 0.6 * torch.rand(len(ink), 1, 1, 1, device=ink.device)
    low = (1 - apart) * torch.rand_like(apart)
    light = torch.rand_like(apart) < 0.5
    return low + apart * torch.where(light, 1 - ink, ink)


class CaptionTower(TextFeatureTower):
    """glyph-small's text tower, which in training reads a random half of a caption's features."""

    def __init__(self) -> None:
        super().__init__(WIDTH, BUCKETS)

    def forward(self, text: Tensor) -> Tensor:
        """As `TextFeatureTower`."""
        return super().forward(_some(text, DROPPED["icons"]) if self.training else text)


class TextTower(nn.Module):
    """A transformer of tokens: pre-norm blocks, the mean over tokens."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(text_pairs.VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Features (n, 256), not normalised, of tokens (n, length)."""
        if self.training:
            tokens = _some(tokens, DROPPED["texts"])
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        read = (tokens > 0).unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        mean = (self.norm(x) * read).sum(1) / read.sum(1).clamp(min=1)
        return self.head(mean)


def _some(tokens: Tensor, dropped: float) -> Tensor:
    return tokens * (torch.rand(tokens.shape, device=tokens.device) >= dropped)


def icon_towers() -> tuple[nn.Module, nn.Module]:
    """The towers of icons and of their captions."""
    return IconTower(), CaptionTower()


def text_towers() -> tuple[nn.Module, nn.Module]:
    """One tower for both sides."""
    tower = TextTower()
    return tower, tower


TOWERS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "icons": icon_towers,
    "texts": text_towers,
}
