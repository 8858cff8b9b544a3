"""The notebooks run from the first cell to the last, at small size, and keep their outputs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import NOTEBOOKS, ROOT, blocks

#: The sizes of a notebook, and those of this test.
SMALLER = {
    "docs/notebooks/clip.ipynb": {
        "COUNT = 3000": "COUNT = 60",
        "--global-batch-size 500 --epochs 16": "--global-batch-size 20 --epochs 1",
    },
    "docs/notebooks/retriever.ipynb": {
        "BATCH, STEPS = 2048, 100": "BATCH, STEPS = 64, 2",
        'PACKAGES = ["numpy", "matplotlib", "sklearn"]': 'PACKAGES = ["numpy"]',
        "pairs += functions(library, library)\n": "",
    },
}


def as_python(cell: str) -> str:
    """A cell of shell has one command, which runs in this process; nothing has to be installed."""
    cell = re.sub(r"^( +)%pip .*", r"\1raise AssertionError", cell, flags=re.M)
    if not cell.startswith("%%sh\n"):
        return cell
    words = shlex.split(cell.removeprefix("%%sh\n").replace("\\\n", " "))
    return f"from megabatch.cli import main\nassert main({words[1:]}) == 0"


@pytest.mark.concurrency
@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_cells_run(notebook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    cells = blocks(notebook, "python")
    for shown, small in SMALLER[notebook].items():
        assert sum(cell.count(shown) for cell in cells) == 1, shown
        cells = [cell.replace(shown, small) for cell in cells]
    code = "\n".join(map(as_python, cells))
    with plt.rc_context({"backend": "agg"}):
        exec(compile(code, notebook, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_colab_opens_the_notebook_and_installs_the_library(notebook: str) -> None:
    first, install, *_ = json.loads((ROOT / notebook).read_text("utf-8"))["cells"]
    owner = re.search(
        rf"google.com/github/([^/]+/[^/]+)/blob/main/{notebook}", "".join(first["source"])
    )
    assert owner
    assert f'megabatch[train] @ git+https://github.com/{owner[1]}"' in "".join(install["source"])


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_outputs_are_those_of_one_run_from_the_first_cell_to_the_last(notebook: str) -> None:
    text = (ROOT / notebook).read_text("utf-8")
    assert len(text) < 300_000
    cells: list[dict[str, Any]] = json.loads(text)["cells"]
    ran = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in ran] == list(range(1, len(ran) + 1))
    shown = json.dumps([output for cell in ran for output in cell["outputs"]])
    assert shown.count("image/png") >= 2
    assert not re.findall(r'"output_type": "error"|"name": "stderr"|/tmp/|/home/|/root/', shown)
