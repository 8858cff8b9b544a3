"""What the README shows runs as shown."""

from __future__ import annotations

import re

import pytest

from megabatch.cli import COMMANDS
from tests.docs.pages import NOTEBOOKS, PAGES, ROOT, blocks


@pytest.mark.parametrize("number", range(len(blocks("README.md", "python"))))
def test_each_python_block_runs_alone(number: int) -> None:
    exec(compile(blocks("README.md", "python")[number], f"README.md, block {number}", "exec"), {})


def test_there_are_python_blocks() -> None:
    assert len(blocks("README.md", "python")) >= 2


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_every_page_has_an_entry_in_the_table_of_contents() -> None:
    contents = ROOT / "docs/README.md"
    entries = re.findall(r"\]\((?!https?:)([^)#]+)", contents.read_text())
    pages = {
        ROOT / page for page in [*PAGES, *NOTEBOOKS] if page.startswith(("docs/", "examples/"))
    }
    assert pages - {contents} <= {(contents.parent / entry).resolve() for entry in entries}
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


def test_commands_in_the_readme_exist() -> None:
    shown = "\n".join(blocks("README.md", "bash"))
    words = set(re.findall(r"^megabatch (\w+)", shown, flags=re.M))
    assert words == set(COMMANDS)
