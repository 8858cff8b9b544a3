from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.data.glyphs import GlyphSet
from megabatch.errors import UsageError
from megabatch.evaluation.zeroshot import (
    CAPTIONED_DIGITS,
    UNICODE_DIGITS,
    Prompts,
    class_features,
    handwritten_digits,
    read_names,
    read_templates,
)


def test_each_name_goes_into_each_template() -> None:
    prompts = Prompts(("cat", "dog"), ("a {}.", "the {}"))
    assert prompts.texts() == [["a cat.", "the cat"], ["a dog.", "the dog"]]


def test_templates_come_from_open_clip_or_a_file(tmp_path: Path) -> None:
    assert len(read_templates("openai")) == 80
    assert "a photo of the {}." in read_templates("openai")
    assert len(read_templates("simple")) == 7
    path = tmp_path / "templates.txt"
    path.write_text("a {c} here\n\n  one {}\n")
    assert read_templates(str(path)) == ("a {} here", "one {}")


def test_names_come_in_the_order_of_the_classes(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("great crane\nnight_owl\n")
    names = read_names(str(tmp_path / "names.txt"), ["n01", "n02"], 2)
    assert names == ("great crane", "night_owl")
    assert read_names(None, ["golden_retriever", "cat"], 2) == ("golden retriever", "cat")
    assert read_names("imagenet", None, 1000)[0] == "tench"


def test_files_that_are_missing_or_wrong_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"names.txt": "one\n", "empty.txt": "\n", "names.json": "{}", "t.txt": "a photo\n"}
    for name, text in files.items():
        Path(name).write_text(text)
    for choice, message in (
        ("names.txt", "names.txt: 1 names, but the data have 2 classes"),
        ("imagenet", "imagenet: 1000 names, but the data have 2 classes"),
        ("empty.txt", "has no line"),
        ("names.json", "names.json: expected imagenet or a text file"),
        ("no", "--class-names no: expected imagenet or a text file"),
        (None, "give names by --class-names"),
    ):
        with pytest.raises(UsageError, match=message):
            read_names(choice, None, 2)
    with pytest.raises(UsageError, match="--templates no: expected openai, simple or a file"):
        read_templates("no")
    with pytest.raises(UsageError, match=r"no \{\} for the class name in 'a photo'"):
        read_templates("t.txt")


def test_class_features_are_normalised_means_over_templates() -> None:
    asked: list[str] = []
    torch.manual_seed(0)
    raw = torch.randn(6, 5)

    def encode(texts: Iterable[str]) -> Tensor:
        asked.extend(texts)
        return raw

    got = class_features(encode, Prompts(("cat", "dog"), ("a {}", "{} {{}}", "two {}s")))
    assert asked == ["a cat", "cat {cat}", "two cats", "a dog", "dog {dog}", "two dogs"]
    unit = raw / raw.norm(dim=1, keepdim=True)
    means = torch.stack([unit[:3].mean(0), unit[3:].mean(0)])
    torch.testing.assert_close(got, means / means.norm(dim=1, keepdim=True))


def test_handwritten_digits_are_set_like_the_glyphs(small_glyphs: GlyphSet) -> None:
    images, labels = handwritten_digits()
    assert len(images) == len(labels) == 1797
    assert labels.unique().tolist() == list(range(10))
    pixels = np.stack([np.asarray(image) for image in images])
    assert pixels.shape == (1797, *small_glyphs.images.shape[1:])
    digit = np.isin(small_glyphs.characters, [ord(c) for c in "0123456789"])
    printed = small_glyphs.images[digit]

    def rows_of_ink(of: np.ndarray) -> tuple[float, float]:
        inked = of.mean(0).max(1) > 32
        return inked.argmax(), len(inked) - inked[::-1].argmax()

    # Same polarity, same position: the mean digit begins and ends within 2 pixels of a printed one.
    assert rows_of_ink(pixels) == pytest.approx(rows_of_ink(printed), abs=2)
    assert pixels[:, 0].max() == 0
    assert pixels.mean() == pytest.approx(printed.mean(), rel=0.5)


def test_digit_prompts_are_names_that_the_glyphs_have(small_glyphs: GlyphSet) -> None:
    for name in UNICODE_DIGITS.names:
        assert UNICODE_DIGITS.templates[0].replace("{}", name) in small_glyphs.names
    assert len(CAPTIONED_DIGITS.names) == len(UNICODE_DIGITS.names) == 10
    assert F.normalize(class_features(lambda t: torch.eye(10), CAPTIONED_DIGITS)).shape == (10, 10)
