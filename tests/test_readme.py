"""What the README shows runs as shown."""

from __future__ import annotations

import re

import pytest

from megabatch.cli import COMMANDS
from tests.docs.pages import NOTEBOOKS, PAGES, ROOT, blocks

#: Of the figures that the README quotes.
UNITS = "ms|s|GiB|MB|pairs/s|times"


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


def test_commands_on_the_page_exist() -> None:
    shown = "\n".join(blocks("docs/commands.md", "bash"))
    assert all(re.search(rf"^megabatch {name} ", shown, flags=re.M) for name in COMMANDS)


def _figures(text: str) -> set[str]:
    """The numbers of a text with their units, outside code and links' targets."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    number = r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?"
    return set(re.findall(rf"{number}(?:%| (?:{UNITS})\b|(?![\w²]))", text))


def _paragraphs() -> list[str]:
    """The README's paragraphs, a table together with the sentence that announces it."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text("utf-8"), flags=re.M | re.S)
    return text.replace(":\n\n|", ":\n|").split("\n\n")


def test_figures_are_those_of_the_results() -> None:
    """In a paragraph that links to them, as each does that has a figure of time."""
    results = "".join((ROOT / f"docs/{p}.md").read_text("utf-8") for p in ("results", "appendix"))
    linking = 0
    for paragraph in _paragraphs():
        if "(docs/results.md#" in paragraph:
            linking += 1
            for figure in _figures(paragraph):
                assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d)", results), figure
        else:
            timed = [f for f in _figures(paragraph) if re.search(r" m?s$|%|times|/s", f)]
            assert not timed, timed
    assert linking >= 5


def test_records_are_quoted_by_way_of_the_results() -> None:
    quoted = re.findall(r"benchmarks/results/[\w.-]+", (ROOT / "README.md").read_text("utf-8"))
    assert all(path.endswith(".png") for path in quoted)
