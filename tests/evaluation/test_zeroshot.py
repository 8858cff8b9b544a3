from __future__ import annotations

import json
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
    prompts = Prompts((("cat",), ("dog", "hound")), ("a {}.", "the {}"))
    assert prompts.texts() == [
        ["a cat.", "the cat"],
        ["a dog.", "the dog", "a hound.", "the hound"],
    ]


def test_templates_come_from_open_clip_or_a_file(tmp_path: Path) -> None:
    assert len(read_templates("openai")) == 80
    assert "a photo of the {}." in read_templates("openai")
    assert len(read_templates("simple")) == 7
    path = tmp_path / "templates.txt"
    path.write_text("a {c} here\n\n  one {}\n")
    assert read_templates(str(path)) == ("a {} here", "one {}")


def write(path: Path, document: object) -> str:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


FOLDERS = ["n01", "n02"]


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ("great crane\nnight_owl\n", (("great crane",), ("night_owl",))),
        ({"n02": "owl", "n01": "crane", "n03": "rook"}, (("crane",), ("owl",))),
        ({"n01": ["great_crane", "heron"], "n02": ["owl"]}, (("great crane", "heron"), ("owl",))),
    ],
)
def test_names_come_in_the_order_of_the_classes(
    tmp_path: Path, document: object, names: tuple[tuple[str, ...], ...]
) -> None:
    suffix = "txt" if isinstance(document, str) else "json"
    assert read_names(write(tmp_path / f"names.{suffix}", document), FOLDERS, 2) == names


def test_folders_name_their_classes_and_imagenet_is_known() -> None:
    assert read_names(None, ["golden_retriever", "cat"], 2) == (("golden retriever",), ("cat",))
    imagenet = read_names("imagenet", None, 1000)
    assert imagenet[0] == ("tench",)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("one\n", "names.txt: 1 names, but the data have 2 classes"),
        ("\n", "has no line"),
        ({"n01": "crane"}, ": none for the class 'n02'"),
        ({"n01": "crane", "n02": 3}, r"expected a name or a list of names, got \[3\]"),
        ({"n01": "crane", "n02": []}, r"expected a name or a list of names, got \[\]"),
        (["crane", "owl"], "expected names by class folder"),
        ({"0": ["n01", "crane"], "1": ["n02", "owl"]}, ": none for the class 'n01'"),
        ("{", "names.txt: 1 names"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path: Path, document: object, message: str) -> None:
    suffix = "txt" if isinstance(document, str) else "json"
    with pytest.raises(UsageError, match=message):
        read_names(write(tmp_path / f"names.{suffix}", document), FOLDERS, 2)


def test_files_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--class-names no: expected imagenet or a file"):
        read_names("no", FOLDERS, 2)
    with pytest.raises(UsageError, match="give names by --class-names"):
        read_names(None, None, 2)
    with pytest.raises(UsageError, match="imagenet: 1000 names, but the data have 2 classes"):
        read_names("imagenet", FOLDERS, 2)
    with pytest.raises(UsageError, match="expected names by class folder"):
        read_names(write(tmp_path / "a.json", "{"), FOLDERS, 2)
    with pytest.raises(UsageError, match="--templates no: expected openai, simple or a file"):
        read_templates("no")
    with pytest.raises(UsageError, match=r"no \{\} for the class name in 'a photo'"):
        read_templates(write(tmp_path / "t.txt", "a photo\n"))


def test_class_features_are_normalised_means_over_names_and_templates() -> None:
    asked: list[str] = []
    torch.manual_seed(0)
    raw = torch.randn(9, 5)

    def encode(texts: Iterable[str]) -> Tensor:
        asked.extend(texts)
        return raw

    prompts = Prompts((("cat",), ("dog", "hound")), ("a {}", "{} {{}}", "two {}s"))
    got = class_features(encode, prompts)
    dogs = ["a dog", "dog {dog}", "two dogs", "a hound", "hound {hound}", "two hounds"]
    assert asked == ["a cat", "cat {cat}", "two cats", *dogs]
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
    for (name,) in UNICODE_DIGITS.names:
        assert UNICODE_DIGITS.templates[0].replace("{}", name) in small_glyphs.names
    assert len(CAPTIONED_DIGITS.names) == len(UNICODE_DIGITS.names) == 10
    assert F.normalize(class_features(lambda t: torch.eye(10), CAPTIONED_DIGITS)).shape == (10, 10)
