from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.evaluation.zeroshot import Prompts, class_features, read_names, read_templates


def test_each_name_goes_into_each_template() -> None:
    prompts = Prompts(("cat", "dog"), ("a {}.", "the {}"))
    assert prompts.texts() == ["a cat.", "the cat", "a dog.", "the dog"]


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
    files = {"names.txt": "one\n", "empty.txt": "\n", "t.txt": "a photo\n"}
    for name, text in files.items():
        Path(name).write_text(text)
    for choice, message in (
        ("names.txt", "names.txt: 1 names, but the data have 2 classes"),
        ("imagenet", "imagenet: 1000 names, but the data have 2 classes"),
        ("empty.txt", "has no line"),
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
