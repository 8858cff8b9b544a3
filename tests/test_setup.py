"""The distributions: what the sdist and the wheel hold, and the description that indexes show."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import megabatch

ROOT = Path(__file__).parents[1]
TREES = ("benchmarks", "docs", "examples", "src", "tests", "tools")


def call(backend_function: str, source: Path, output: Path) -> Path:
    """Build with the declared backend, as `python -m build` does, in the environment there is."""
    code = f"import setuptools.build_meta as b; b.{backend_function}({str(output)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (made,) = (p for p in output.iterdir() if p.suffix == (".whl" if "wheel" in code else ".gz"))
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of the sources, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "copy"
    for tree in TREES:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / tree, copy / tree, ignore=ignored)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    with tarfile.open(call("build_sdist", copy, folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (top,) = (folder / "unpacked").iterdir()
    return top


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that is built from the sdist."""
    return zipfile.ZipFile(call("build_wheel", sdist, tmp_path_factory.mktemp("wheel")))


def files(folder: Path) -> set[str]:
    found = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return {str(p) for p in found if not re.search(r"__pycache__|\.egg-info|\.gitkeep", str(p))}


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_sdist_has_all_sources_with_documentation_and_examples(sdist: Path) -> None:
    for tree in TREES:
        assert files(ROOT / tree) <= files(sdist / tree), tree
    top = {path.name for path in sdist.iterdir()}
    assert top >= {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile"}


def test_wheel_has_the_package_with_its_data_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {f"megabatch/{name}" for name in files(ROOT / "src/megabatch")}
    data = ("py.typed", "config/packaged/quickstart.toml", "export/card.md")
    assert packed > {f"megabatch/{name}" for name in (*data, "__main__.py")}
    (licence,) = (name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_description_is_the_readme_without_links_that_lead_nowhere(
    wheel: zipfile.ZipFile,
) -> None:
    shown = metadata(wheel)
    assert shown["Description-Content-Type"] == "text/markdown"
    text = shown.get_payload()
    assert isinstance(text, str)
    assert text.startswith("# megabatch\n")
    assert "(https://arxiv.org/abs/2410.17243)" in text
    assert not re.findall(r"\]\((?!https://)[^)]*\)", text)
    readme = (ROOT / "README.md").read_text()
    code = re.compile(r"^```.*?^```", flags=re.M | re.S)
    assert code.findall(text) == code.findall(readme)


@pytest.mark.parametrize(
    ("repository", "shown"),
    [
        (None, "See the\nkernels, [below](#x), [Inf-CL](https://arxiv.org/abs/1)."),
        (
            "https://example.org/m",
            "See [the\nkernels](https://example.org/m/blob/main/docs/kernels.md#a), "
            "[below](#x), [Inf-CL](https://arxiv.org/abs/1).",
        ),
    ],
)
def test_relative_links(repository: str | None, shown: str) -> None:
    for_index: Callable[..., str] = runpy.run_path(str(ROOT / "setup.py"))["for_index"]
    readme = (
        "See [the\nkernels](docs/kernels.md#a), [below](#x), [Inf-CL](https://arxiv.org/abs/1)."
    )
    assert for_index(readme, repository) == shown


def test_versions_agree(wheel: zipfile.ZipFile) -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.M)
    assert cited is not None
    shown = re.search(r"version = \{(.*)\}", (ROOT / "README.md").read_text("utf-8"))
    assert shown is not None
    assert shown[1] == cited[1] == metadata(wheel)["Version"] == megabatch.__version__
