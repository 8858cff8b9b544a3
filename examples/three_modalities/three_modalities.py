"""Three modalities: images, names and code points of characters, aligned through the names.

Real data: the glyphs (characters of the fonts that come with matplotlib, 32 x 32 pixels), their
Unicode names and their code points. As in ImageBind (arXiv 2305.05665), the loss compares images
with names and names with code points; images and code points are never compared, and half of the
characters have no image. Recall from images, in a typeface that training did not see, to code
points shows that both were aligned. Needs megabatch[train]; takes seconds on a CPU.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from megabatch.data.glyphs import load_glyphs
from megabatch.models import create

TRAINED, UNSEEN = "DejaVuSans", "DejaVuSerif"  # typefaces


class CodeTower(nn.Module):
    """Features (n, 256) of code points, int64 (n,), by their hexadecimal digits."""

    def __init__(self) -> None:
        super().__init__()
        self.digits = nn.Embedding(5 * 16, 64)
        self.layers = nn.Sequential(nn.Linear(5 * 64, 512), nn.GELU(), nn.Linear(512, 256))

    def forward(self, codes: Tensor) -> Tensor:
        """Encode."""
        places = torch.arange(5)
        digits = (codes[:, None] >> (4 * places)) % 16
        return self.layers(self.digits(digits + 16 * places).flatten(1))


def characters(count: int) -> tuple[Tensor, Tensor, list[str], Tensor]:
    """Images (n, 1, 32, 32) in both typefaces, names, and code points (n,), in random order."""
    glyphs = load_glyphs()
    rows = []
    for face in (TRAINED, UNSEEN):
        (found,) = (glyphs.faces == glyphs.face_names.index(face)).nonzero()
        rows.append(dict(zip(glyphs.characters[found].tolist(), found.tolist(), strict=True)))
    codes = torch.tensor(sorted(rows[0].keys() & rows[1].keys()))
    codes = codes[torch.randperm(len(codes))[:count]]
    first, second = ([found[code] for code in codes.tolist()] for found in rows)
    names = [glyphs.names[i] for i in glyphs.name_ids[first]]
    trained, unseen = (torch.from_numpy(glyphs.images[i, None]) for i in (first, second))
    return trained, unseen, names, codes


def main() -> None:
    """Train, and print recall of a pair of modalities that the loss does not compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--characters", type=int, default=400)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if options.characters < 2:
        parser.error(f"--characters: expected at least 2, got {options.characters}")

    torch.manual_seed(0)
    images, unseen, names, codes = characters(options.characters)
    towers, code_tower = create("glyph-small"), CodeTower()
    texts = towers.tokenizer(names)
    has_image = torch.rand(len(codes)) < 0.5  # the others' rows are not looked at

    criterion = mb.MultiModalLoss([("image", "name"), ("name", "code")], normalize=True)

    def loss(image: Tensor, name: Tensor, code: Tensor) -> Tensor:
        features = {"image": image, "name": name, "code": code}
        return criterion(features, 14.3, present={"image": has_image})

    encoders = (towers.module.encode_image, towers.module.encode_text, code_tower)
    step = mb.GradientCache(encoders, loss, micro_batch_size=200)
    parameters = [*towers.module.parameters(), *code_tower.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=4e-3)
    for i in range(options.steps):
        optimizer.zero_grad()
        value = step(images, texts, codes)
        value.backward()
        optimizer.step()
        if (i + 1) % 10 == 0 or i + 1 == options.steps:
            print(f"step {i + 1}: loss {value:.3f}")

    with torch.no_grad():
        image = F.normalize(towers.module.encode_image(unseen[has_image]))
        code = F.normalize(code_tower(codes))
    found = mb.retrieval_metrics(image, code, x_ids=codes[has_image], y_ids=codes)
    print(f"image to code point: recall@1 {found['x_to_y/recall@1']:.3f}, ", end="")
    print(f"{1 / len(codes):.3f} by chance")


if __name__ == "__main__":
    main()
