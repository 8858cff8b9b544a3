"""Class names and prompt templates: from files, or those that OpenCLIP brings for ImageNet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.errors import UsageError
from megabatch.evaluation.labels import read_lines

IMAGENET = "imagenet"
OPENAI, SIMPLE = "openai", "simple"


@dataclass(frozen=True)
class Prompts:
    """Names of each class, and the templates that each name is put into (at its `{}`).

    source: where both come from, in words.
    """

    names: tuple[tuple[str, ...], ...]
    templates: tuple[str, ...]
    source: str = ""

    def texts(self) -> list[list[str]]:
        """What each class is called: each of its names in each template."""
        return [
            [template.replace("{}", name) for name in names for template in self.templates]
            for names in self.names
        ]

    def shown(self) -> str:
        """The templates and where they come from, in words."""
        return f"{quoted(self.templates)} ({self.source})"


def quoted(templates: Sequence[str]) -> str:
    """The first templates, and how many more there are."""
    first = ", ".join(f"“{template}”" for template in templates[:3])
    return first + (f" and {len(templates) - 3} more" if len(templates) > 3 else "")


def read_templates(choice: str) -> tuple[str, ...]:
    """Templates with `{}` where the class name goes.

    Args:
        choice: "openai", the 80 that CLIP was evaluated with on ImageNet; "simple", the 7 of them
            that do nearly as well; or a text file with one a line, `{}` or `{c}` for the name.

    Raises:
        UsageError: no such file, or a line without a place for the name.
    """
    if choice in (OPENAI, SIMPLE):
        import open_clip

        known = (
            open_clip.OPENAI_IMAGENET_TEMPLATES
            if choice == OPENAI
            else open_clip.SIMPLE_IMAGENET_TEMPLATES
        )
        return tuple(template("{}") for template in known)
    if not Path(choice).is_file():
        raise UsageError(f"--templates {choice}: expected openai, simple or a file")
    lines = tuple(line.replace("{c}", "{}") for line in read_lines(Path(choice)))
    for line in lines:
        if "{}" not in line:
            raise UsageError(f"--templates {choice}: no {{}} for the class name in {line!r}")
    return lines


def read_names(
    choice: str | None, classes: Sequence[str] | None, n_classes: int
) -> tuple[tuple[str, ...], ...]:
    """The names of each class.

    Args:
        choice: "imagenet", OpenCLIP's names of ImageNet's 1,000 classes; a text file with one name
            a line, in the order of the classes; a JSON file with a list of names, or with names by
            class folder (one or a list; also by number with [folder, name], as ImageNet's index
            is often found); None for `classes` with spaces for underscores.
        classes: the folders' names, or names that came with the data; None where classes are
            numbers only.
        n_classes: how many there must be.

    Raises:
        UsageError: no such file, no name for a class, or too few or too many of them.
    """
    if choice is None:
        if classes is None:
            raise UsageError("the shards have no classnames.txt: give names by --class-names")
        names: tuple[tuple[str, ...], ...] = tuple(
            (name.replace("_", " ").strip() or name,) for name in classes
        )
    elif choice == IMAGENET:
        import open_clip

        names = tuple((name,) for name in open_clip.IMAGENET_CLASSNAMES)
    elif not Path(choice).is_file():
        raise UsageError(f"--class-names {choice}: expected imagenet or a file")
    elif Path(choice).suffix == ".json":
        names = _names_from_json(Path(choice), classes)
    else:
        names = tuple((line,) for line in read_lines(Path(choice)))
    if len(names) != n_classes:
        raise UsageError(
            f"--class-names {choice}: {len(names)} names, but the data have {n_classes} classes"
        )
    return names


def _names_from_json(path: Path, classes: Sequence[str] | None) -> tuple[tuple[str, ...], ...]:
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--class-names {path}: cannot be read: {error}") from error
    if isinstance(document, list):
        return tuple(_names_of(value, path) for value in document)
    if not isinstance(document, dict):
        raise UsageError(f"--class-names {path}: expected a list, or names by class folder")
    if classes is None:
        classes = [str(i) for i in range(len(document))]
    by_class = _by_folder(document, classes)
    missing = [name for name in classes if name not in by_class]
    if missing:
        raise UsageError(
            f"--class-names {path}: none for {len(missing)} of {len(classes)} classes, such as "
            f"{missing[0]!r}"
        )
    return tuple(_names_of(by_class[name], path) for name in classes)


def _by_folder(document: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """`document`, turned around where it is {"0": ["n01440764", "tench"], ...}."""
    values = list(document.values())
    pairs = all(isinstance(v, list) and len(v) == 2 for v in values)
    if pairs and not set(classes) & set(document) and {v[0] for v in values} & set(classes):
        return {folder: name for folder, name in values}
    return document


def _names_of(value: Any, path: Path) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise UsageError(f"--class-names {path}: expected a name or a list of names, got {value!r}")
    return tuple(name.strip().replace("_", " ") for name in names)
