"""The documentation site: `make docs` builds it into build/docs, with warnings as errors.

Its root is that of the repository, so that the links of all pages lead to the same files here, in
a checkout and on the site. README.md is the first page. docs/README.md is the table of contents:
each of its sections becomes a part of the sidebar.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from megabatch import __version__ as release
from megabatch.cli import main

ROOT = Path(__file__).parents[1]
PARTS = ("data", "evaluation", "export", "models", "planning", "similarity", "training")
LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)]*)\)")

project = "megabatch"
html_title = f"{project} {release}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "benchmarks/README.md", "docs/**", "examples/**.md"]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests", "tools"]

myst_heading_anchors = 4  # the anchors that links in Markdown name
nb_execution_mode = "off"  # notebooks are committed with their outputs
nb_merge_streams = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False

# Docstrings: Google's sections, and single backticks for code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False

#: Packages with their public names, which some import on first access: autodoc would see none.
PUBLIC = {
    name: importlib.import_module(name).__all__
    for name in ("megabatch", *(f"megabatch.{part}" for part in PARTS))
}
for _package, _names in PUBLIC.items():
    for _name in _names:
        getattr(sys.modules[_package], _name)


def _toctrees() -> str:
    """The sections of docs/README.md as parts of the sidebar."""
    contents = ROOT / "docs/README.md"
    found, seen = "\n```{toctree}\n:hidden:\n/docs/README\n```\n", {"README", "docs/README"}
    for section in re.split(r"^## ", contents.read_text("utf-8"), flags=re.M)[1:]:
        caption, _, body = section.partition("\n")
        pages = []
        for _, target in LINK.findall(body):
            file = Path(os.path.normpath(contents.parent / target.partition("#")[0]))
            page = str(file.relative_to(ROOT).with_suffix(""))
            if file.suffix in (".md", ".ipynb") and page not in seen:
                pages.append(f"/{page}")
                seen.add(page)
        if pages:
            listed = "\n".join(pages)
            found += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n{listed}\n```\n"
    return found


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the sidebar to the first page; a link to a folder becomes its text alone."""
    folder = ROOT / Path(page).parent

    def kept(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    source[0] = LINK.sub(kept, source[0]) + (_toctrees() if page == root_doc else "")


def _mark_code(app: Sphinx, kind: str, name: str, value: object, options: object,
               lines: list[str]) -> None:  # fmt: skip
    """As in Markdown, an indented block after an empty line is code."""
    before = ""
    for i, line in enumerate(lines):
        starts = line.startswith("    ") and i and not lines[i - 1]
        if starts and before and not before.startswith(" ") and not before.endswith(":"):
            lines[i - 1] = "\n::\n"
        before = line or before
    lines[:] = "\n".join(lines).split("\n")


def _hide_factories(
    app: Sphinx, kind: str, name: str, value: object, options: object, *signature: str | None
) -> tuple[str | None, ...]:
    """A dataclass's default_factory is no Python, and would leave the whole signature unparsed."""
    return tuple(part and part.replace("<factory>", "...") for part in signature)


class Help(SphinxDirective):
    """A command line with --help, replaced by its output."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Run the command in this process."""
        words = shlex.split(self.content[0])[1:]
        os.environ["COLUMNS"] = "84"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if code := main(words):
                raise self.error(f"{self.content[0]}: exit code {code}")
        return [nodes.literal_block("", printed.getvalue(), language="text")]


def _check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that no page of the reference has."""
    for package, names in PUBLIC.items():
        for name in names:
            if f"{package}.{name}" not in env.get_domain("py").objects and name not in PARTS:
                logging.getLogger(__name__).warning("%s.%s: in no reference", package, name)


def _make_index(app: Sphinx, failed: Exception | None) -> None:
    """The first page also under the name that servers look for."""
    if not failed and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.add_directive("help", Help)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _mark_code, priority=0)
    app.connect("autodoc-process-signature", _hide_factories)
    app.connect("env-check-consistency", _check_reference)
    app.connect("build-finished", _make_index)
