from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.errors import UsageError
from megabatch.evaluation.prompts import Prompts, read_names, read_templates


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
        (["crane", "owl"], (("crane",), ("owl",))),
        ({"n02": "owl", "n01": "crane", "n03": "rook"}, (("crane",), ("owl",))),
        ({"n01": ["crane", "heron"], "n02": ["owl"]}, (("crane", "heron"), ("owl",))),
        ({"0": ["n01", "great_crane"], "1": ["n02", "owl"]}, (("great crane",), ("owl",))),
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
        ({"n01": "crane"}, ": none for 1 of 2 classes, such as 'n02'"),
        ({"n01": "crane", "n02": 3}, "expected a name or a list of names, got 3"),
        (["crane", []], r"expected a name or a list of names, got \[\]"),
        ("{", "names.txt: 1 names"),
        (7, "expected a list, or names by class folder"),
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
    with pytest.raises(UsageError, match="cannot be read"):
        read_names(write(tmp_path / "a.json", "{"), FOLDERS, 2)
    with pytest.raises(UsageError, match="--templates no: expected openai, simple or a file"):
        read_templates("no")
    with pytest.raises(UsageError, match=r"no \{\} for the class name in 'a photo'"):
        read_templates(write(tmp_path / "t.txt", "a photo\n"))
