"""The pages of the documentation and their blocks of code."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [
        *ROOT.glob("*.md"),
        ROOT / "benchmarks/README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
NOTEBOOKS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.ipynb"))

#: A block may be indented, in a list; its first line may name a language.
_BLOCK = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.M | re.S)


def blocks(page: str, language: str) -> list[str]:
    """The code of a page's blocks in this language; a notebook's cells are in Python."""
    text = (ROOT / page).read_text("utf-8")
    if page.endswith(".ipynb"):
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return ["".join(cell["source"]) for cell in cells if language == "python"]
    return [textwrap.dedent(code) for _, name, code in _BLOCK.findall(text) if name == language]


def languages(page: str) -> set[str]:
    """The languages that a page's blocks name; "" for a block that names none."""
    return {name for _, name, _ in _BLOCK.findall((ROOT / page).read_text("utf-8"))}
