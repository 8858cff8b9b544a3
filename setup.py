"""The description that package indexes show; all else is in pyproject.toml.

It is README.md. Its links are relative, so that they work in every checkout, but lead nowhere on an
index page: there they point into the repository that `[project.urls]` names or, as long as it names
none, are plain text.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def for_index(readme: str, repository: str | None) -> str:
    """The README with absolute links, or with the texts of its relative links alone."""
    link = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)]*)\)")
    replacement = r"\1" if repository is None else rf"[\1]({repository}/blob/main/\2)"
    return link.sub(replacement, readme)


if __name__ == "__main__":
    named = re.search(
        r'^Repository = "([^"]*?)/?"$', (ROOT / "pyproject.toml").read_text("utf-8"), flags=re.M
    )
    setup(
        long_description=for_index(
            (ROOT / "README.md").read_text("utf-8"), None if named is None else named[1]
        ),
        long_description_content_type="text/markdown",
    )
