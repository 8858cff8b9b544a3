"""The data sets of batch_study.py, whole on one device: icons with captions, words with glosses.

Both are divided alike. A family that training never sees is the `unseen` test set: of the icons the
held-out families of sets, of WordNet three lexicographer files. Of the rest a hash picks 4% each
for `validation`, by which learning rates are chosen, and for the `in_domain` test set; the others
are `train`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from machinery.icon_towers import jittered
from megabatch.data.images import decoded
from megabatch.data.pairs import caption_id
from megabatch.data.sources import open_pairs
from megabatch.models import ModelOptions, Towers
from megabatch.models.glyph import (
    IMAGE_SIZE,
    GlyphImageTower,
    GlyphTransform,
    HashingTokenizer,
    TextFeatureTower,
)
from megabatch.models.towers import TwoTowers

#: Data sets by name, with the model that is trained on each.
MODELS = {name: f"machinery.study_data:{name}_towers" for name in ("icons", "wordnet")}
#: Lexicographer files that are WordNet's unseen family: noun.body, noun.food, verb.motion.
UNSEEN_FILES = (8, 13, 38)
HELD_OUT_PERCENT = 4
KEPT_FEATURES = 0.5  # of a text, in training

_BUCKETS, _WIDTH = 16_384, 256
_MARKER = re.compile(r"\((?:a|p|ip)\)$")  # an adjective's position, after its word


class Pairs(NamedTuple):
    """Pairs on one device.

    first: images, uint8 (n, 1, 32, 32), or tokens, int64 (n, context).
    texts: tokens, int64 (n, context).
    ids: int64 (n,), equal for equal texts.
    """

    first: Tensor
    texts: Tensor
    ids: Tensor

    def rows(self, chosen: Tensor | slice) -> Pairs:
        """Some of the pairs."""
        return Pairs(self.first[chosen], self.texts[chosen], self.ids[chosen])

    def to(self, device: torch.device) -> Pairs:
        """The same on another device."""
        return Pairs(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True)
class StudyData:
    """A data set: pairs to train on, and those to evaluate on.

    tests: "validation", "in_domain", "unseen" and "seen"; the last are training pairs, chosen as
        `in_domain` is: their lead over `in_domain` was memorised.
    """

    train: Pairs
    tests: dict[str, Pairs]


def load(name: str, folder: Path, device: torch.device) -> StudyData:
    """A data set of `MODELS`, on a device.

    Args:
        name: of the data set.
        folder: of icons, as `benchmarks/draw_icons.py --size 32` writes it; of WordNet's
            files, as Debian's wordnet-base has them (/usr/share/wordnet).
        device: where the tensors are.

    Raises:
        UsageError, OSError: a file is missing or damaged.
    """
    return {"icons": _icons, "wordnet": _wordnet}[name](folder, device)


def icons_towers(options: ModelOptions) -> Towers:
    """glyph-small, whose towers see another form of each pair every time that it comes."""
    module = TwoTowers(JitteredTower(_WIDTH), DroppingTower(_WIDTH, _BUCKETS), options)
    transform = GlyphTransform()
    return Towers("icons", module, transform, transform, tokenizer(), _WIDTH)


def wordnet_towers(options: ModelOptions) -> Towers:
    """Two of glyph-small's text towers, for words and for their glosses."""
    words, glosses = (DroppingTower(_WIDTH, _BUCKETS) for _ in range(2))
    module = TwoTowers(words, glosses, options)
    return Towers("wordnet", module, tokenizer(), tokenizer(), tokenizer(), _WIDTH, first="text")


def tokenizer() -> HashingTokenizer:
    """The tokenizer of all texts."""
    return HashingTokenizer(_BUCKETS, 64)


class JitteredTower(GlyphImageTower):
    """glyph-small's image tower; in training images are shifted and scaled at random."""

    def forward(self, image: Tensor) -> Tensor:
        """As `GlyphImageTower`."""
        return super().forward(jittered(image.float()) if self.training else image)


class DroppingTower(TextFeatureTower):
    """glyph-small's text tower, which in training reads a random half of each text's features.

    Without that it knows the training set of WordNet by heart after a few epochs.
    """

    def forward(self, text: Tensor) -> Tensor:
        """As `TextFeatureTower`."""
        if self.training:
            text = text * (torch.rand(text.shape, device=text.device) < KEPT_FEATURES)
        return super().forward(text)


def _icons(folder: Path, device: torch.device) -> StudyData:
    def pairs(split: str) -> tuple[Pairs, np.ndarray]:
        source = open_pairs(str(folder / split))
        samples = [source[i] for i in range(len(source))]
        pixels = np.stack([np.asarray(decoded(one.image)) for one in samples])
        if pixels.shape[-1] != IMAGE_SIZE:
            raise ValueError(f"{folder}: icons of {pixels.shape[-1]} pixels, expected {IMAGE_SIZE}")
        images = torch.from_numpy(255 - pixels[:, None])  # white on black, as glyphs
        captions = [one.caption for one in samples]
        ids = torch.tensor([caption_id(caption) for caption in captions])
        keys = [one.key.partition(":")[2].encode() for one in samples]  # without the shard's name
        return Pairs(images, _tokens(captions), ids).to(device), _draws(keys)

    rest, draws = pairs("train")
    return _divided(rest, draws, pairs("test")[0])


def _wordnet(folder: Path, device: torch.device) -> StudyData:
    synsets = [synset for part in ("noun", "verb", "adj", "adv")
               for synset in read_synsets(folder / f"data.{part}")]  # fmt: skip

    def pairs(chosen: Sequence[Synset]) -> tuple[Pairs, np.ndarray]:
        words = [word for synset in chosen for word in synset.words]
        times = torch.tensor([len(synset.words) for synset in chosen])
        glosses = _tokens([synset.gloss for synset in chosen])
        ids = torch.tensor([caption_id(synset.gloss) for synset in chosen])
        # By gloss, so that all words of a synset are on one side of each split.
        draws = _draws([synset.gloss.encode() for synset in chosen])
        repeated = (tensor.repeat_interleave(times, 0) for tensor in (glosses, ids))
        whole = Pairs(_tokens(words), *repeated)
        return whole.to(device), np.repeat(draws, times.numpy())

    rest, draws = pairs([s for s in synsets if s.file not in UNSEEN_FILES])
    return _divided(rest, draws, pairs([s for s in synsets if s.file in UNSEEN_FILES])[0])


class Synset(NamedTuple):
    """A synset's words and definition, and the number of its lexicographer file."""

    words: list[str]
    gloss: str
    file: int


def read_synsets(path: Path) -> Iterator[Synset]:
    """The synsets of a data file of WordNet (wndb(5WN)), without the glosses' examples."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(" "):  # the licence
                continue
            fields, _, gloss = line.partition(" | ")
            _, file, _, count, *rest = fields.split(" ")
            words = [
                _MARKER.sub("", word).replace("_", " ") for word in rest[: 2 * int(count, 16) : 2]
            ]
            yield Synset(words, gloss.split('; "')[0].strip(), int(file))


def _tokens(texts: list[str]) -> Tensor:
    tokens = tokenizer()
    return torch.cat([tokens(texts[i : i + 4096]) for i in range(0, len(texts), 4096)])


def _draws(keys: Sequence[bytes]) -> np.ndarray:
    """A number from 0 to 99 for each key, by a hash: it stays if other keys come or go."""
    return np.array([zlib.crc32(key) % 100 for key in keys])


def _divided(rest: Pairs, draws: np.ndarray, unseen: Pairs) -> StudyData:
    def where(low: int) -> Pairs:
        return rest.rows(
            torch.from_numpy(np.flatnonzero(draws // HELD_OUT_PERCENT == low)).to(device)
        )

    device = rest.ids.device
    train = torch.from_numpy(np.flatnonzero(draws >= 2 * HELD_OUT_PERCENT)).to(device)
    tests = {
        "validation": where(0),
        "in_domain": where(1),
        "unseen": unseen,
        "seen": where(2),
    }
    return StudyData(rest.rows(train), tests)
