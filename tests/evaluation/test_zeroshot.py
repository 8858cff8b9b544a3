from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sklearn.metrics import recall_score, top_k_accuracy_score

from megabatch.errors import UsageError
from megabatch.evaluation.samples import Labelled
from megabatch.evaluation.tasks import accuracy
from megabatch.evaluation.zeroshot import Prompts, class_features, read_prompts


def images(classes: list[str] | None, n_classes: int, templates: Path | None = None) -> Labelled:
    found = Labelled()
    found.classes, found.n_classes, found.templates = classes, n_classes, templates
    return found


def test_templates_come_from_open_clip_a_file_or_the_images(tmp_path: Path) -> None:
    cat = images(["cat"], 1)
    assert len(read_prompts(None, None, cat).templates) == 80
    assert "a photo of the {}." in read_prompts(None, "openai", cat).templates
    assert len(read_prompts(None, "simple", cat).templates) == 7
    path = tmp_path / "templates.txt"
    path.write_text("a {c} here\n\n  one {}\n")
    for prompts in (
        read_prompts(None, str(path), cat),
        read_prompts(None, None, images(["cat"], 1, path)),
    ):
        assert prompts.templates == ("a {} here", "one {}")
        assert prompts.source == f"from {path}; class names: those of the data"


def test_names_come_in_the_order_of_the_classes(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("great crane\nnight_owl\n")
    names = read_prompts(str(path), "simple", images(["n01", "n02"], 2)).names
    assert names == ("great crane", "night_owl")
    names = read_prompts(None, "simple", images(["golden_retriever", "cat"], 2)).names
    assert names == ("golden retriever", "cat")
    assert read_prompts("imagenet", "simple", images(None, 1000)).names[0] == "tench"


def test_files_that_are_missing_or_wrong_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"names.txt": "one\n", "empty.txt": "\n", "t.txt": "a photo\n"}.items():
        Path(name).write_text(text)
    for names, templates, message in (
        ("names.txt", None, "names.txt: 1 names, but the data have 2 classes"),
        ("imagenet", None, "imagenet: 1000 names, but the data have 2 classes"),
        ("empty.txt", None, "has no line"),
        ("no", None, "--class-names no: expected imagenet or a text file"),
        (None, None, "give names by --class-names"),
        ("two.txt", "no", "--templates no: expected openai, simple or a file"),
        ("two.txt", "t.txt", r"no \{\} for the class name in 'a photo'"),
    ):
        Path("two.txt").write_text("one\ntwo\n")
        with pytest.raises(UsageError, match=message):
            read_prompts(names, templates, images(None, 2))


def test_class_features_are_normalised_means_over_templates() -> None:
    asked: list[str] = []
    raw = torch.randn(6, 5)
    prompts = Prompts(("cat", "dog"), ("a {}", "{} {{}}", "two {}s"))
    got = class_features(lambda texts: asked.extend(texts) or raw, prompts)
    assert asked == ["a cat", "cat {cat}", "two cats", "a dog", "dog {dog}", "two dogs"]
    unit = raw / raw.norm(dim=1, keepdim=True)
    means = torch.stack([unit[:3].mean(0), unit[3:].mean(0)])
    torch.testing.assert_close(got, means / means.norm(dim=1, keepdim=True))


def test_accuracies_equal_scikit_learns() -> None:
    generator = torch.Generator().manual_seed(1)
    classes = torch.randn(12, 8, generator=generator)
    labels = torch.randint(0, 10, (300,), generator=generator).pow(2) // 10  # two never occur
    images = 0.5 * classes[labels] + torch.randn(300, 8, generator=generator)
    scores = images @ classes.T
    everything, occurring = list(range(12)), sorted(set(labels.tolist()))
    expected = {
        f"top{k}": top_k_accuracy_score(labels, scores, k=k, labels=everything) for k in (1, 5)
    }
    expected["mean_per_class_recall"] = recall_score(
        labels, scores.argmax(1), labels=occurring, average="macro", zero_division=0
    )
    assert accuracy(images, classes, labels) == pytest.approx(expected)
