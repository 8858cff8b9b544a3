"""A library that is not installed: named with its extra, by each command that needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megabatch.imports import DISTRIBUTIONS, MissingLibrary, missing, named_extras
from tests.data.samples import png
from tests.models.tiny_bert import save_tiny_bert

ROOT = Path(__file__).parents[1]

SMALL = "--steps 1 --global-batch-size 2 --micro-batch-size 2 --device cpu --plan off --output new"
TRAIN = f"train --model glyph-small --train-data pairs.csv {SMALL}"
WATCHED = f"{TRAIN} --report-to tensorboard wandb mlflow"
BENCH = "bench loss --batch-size 8 --width 8 --contenders megabatch --device cpu"

#: By command, the libraries that it cannot do without.
NEEDS = {
    TRAIN: "numpy PIL psutil pyarrow rich safetensors tensorboard webdataset",
    f"train --model glyph-small --train-data glyphs {SMALL}": "matplotlib",
    f"{TRAIN} --val-data pairs.csv": "torchvision",
    f"{TRAIN} --opt lamb": "timm",
    WATCHED: "alembic mlflow sqlalchemy wandb",
    f"train --model ViT-B-32 --train-data pairs.csv {SMALL}": "open_clip",
    f"train --model hf:bert --train-data texts.jsonl {SMALL}": "tokenizers transformers",
    "plan --model glyph-small --device cpu": "numpy PIL psutil rich",
    "eval run --val-data pairs.csv": "jinja2 matplotlib numpy PIL rich safetensors",
    BENCH: "psutil rich",
    "data inspect pairs.csv": "numpy PIL pyarrow webdataset",
    "data glyphs --output shards": "matplotlib numpy PIL webdataset",
    "from megabatch.data import open_pairs": "numpy PIL",
    "from megabatch.training import train": "psutil rich",
}
CASES = [(asked, library) for asked, names in NEEDS.items() for library in names.split()]

UNNEEDED = "jinja2 matplotlib open_clip sklearn timm tokenizers torchvision transformers"
ALL = " ".join(sorted({*" ".join([*NEEDS.values(), UNNEEDED, "simplejpeg tomli"]).split()}))
HELPFUL = ("train", "plan", "eval", "export", "data glyphs")
HELP = [f"{command} --help" for command in HELPFUL]
WITHOUT = [(TRAIN, UNNEEDED), *((asked, ALL) for asked in [*HELP, "bench loss --help"])]


def is_python(asked: str) -> bool:
    return asked.startswith("from ")


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str | None], tuple[object, str]]:
    """How each run ended, with its output, by what was asked and the library that it misses."""
    folder = tmp_path_factory.mktemp("libraries")
    save_tiny_bert(folder / "bert")
    (folder / "run").mkdir()
    (folder / "run/config.toml").write_text('model = "glyph-small"')
    (folder / "pairs.csv").write_text("filepath,title\na.png,one\nb.png,two\n")
    (folder / "texts.jsonl").write_text('{"query": "a", "positive": "b"}\n' * 2)
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(png())
    cases = [*NEEDS.items(), *WITHOUT]
    given = [(names.split(), a if is_python(a) else a.split()) for a, names in cases]
    done = subprocess.run(
        [sys.executable, "-m", "tests.without_libraries"],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        (asked, library): (code, text)
        for (asked, _), outcomes in zip(cases, lines, strict=True)
        for library, code, text in outcomes
    }


@pytest.mark.parametrize(("asked", "library"), CASES)
def test_a_missing_library_is_named_with_its_extra(
    asked: str, library: str, ended: dict[tuple[str, str | None], tuple[object, str]]
) -> None:
    assert (asked, library) in ended, f"no error names it: {ended}"
    code, text = ended[asked, library]
    others = {"hf": "tokenizers transformers", "watch": NEEDS[WATCHED]}
    extra = next((extra for extra, names in others.items() if library in names.split()), "train")
    extra = "bench" if asked == BENCH else extra
    sentence = f"{DISTRIBUTIONS.get(library, library)} is not installed, which this needs: pip "
    told = text.splitlines()[0 if is_python(asked) else -1]
    assert f"{sentence}install 'megabatch[{extra}]'" in told
    assert code == ("MissingLibrary" if is_python(asked) else 2)
    assert is_python(asked) or "Traceback" not in text


@pytest.mark.parametrize("asked", [asked for asked, _ in WITHOUT])
def test_what_is_not_needed_is_not_asked_for(
    asked: str, ended: dict[tuple[str, str | None], tuple[object, str]]
) -> None:
    assert (asked, None) in ended, f"something is missing: {ended}"
    code, text = ended[asked, None]
    assert code == 0, text


def test_the_extra_is_the_commands_own_or_has_the_library() -> None:
    assert missing("psutil", "bench").endswith("'megabatch[bench]'")
    assert missing("tomli").endswith("'megabatch[train]'")
    assert missing("transformers", "bench").endswith("'megabatch[hf]'")


def test_our_own_mistakes_are_no_missing_library() -> None:
    with pytest.raises(ModuleNotFoundError, match="megabatch"), named_extras():
        import megabatch.nothing  # noqa: F401
    with pytest.raises(MissingLibrary, match="nothing is not"), named_extras():
        import nothing.at_all  # noqa: F401
