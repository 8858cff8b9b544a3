"""What the README shows runs as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megabatch.cli import COMMANDS
from tests import programs

ROOT = Path(__file__).parents[1]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
PAGES = [README, CONTRIBUTING, ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("number", range(len(blocks(README, "python"))))
def test_each_python_block_runs_alone(number: int) -> None:
    exec(compile(blocks(README, "python")[number], f"README.md, block {number}", "exec"), {})


def test_there_are_python_blocks() -> None:
    assert len(blocks(README, "python")) >= 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example: Path) -> None:
    ended = programs.run([str(example), "--steps", "3"])
    assert ended.returncode == 0, ended.stderr
    assert "recall@1" in ended.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_has_an_entry_in_the_table_of_contents() -> None:
    contents = ROOT / "docs/README.md"
    entries = re.findall(r"\]\((?!https?:)([^)#]+)", contents.read_text())
    pages = {page.resolve() for page in (ROOT / "docs").rglob("*.md")} - {contents.resolve()}
    assert pages <= {(contents.parent / entry).resolve() for entry in entries}
    assert "(docs/README.md)" in README.read_text()


def test_commands_in_the_readme_exist() -> None:
    shown = "\n".join(blocks(README, "bash"))
    words = set(re.findall(r"^megabatch (\w+)", shown, flags=re.M))
    assert words == set(COMMANDS)


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for page in (README, CONTRIBUTING):
        shown = "\n".join(blocks(page, "bash"))
        assert set(re.findall(r"^make ([a-z-]+)", shown, flags=re.M)) <= targets
