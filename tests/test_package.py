"""The package as a whole: what importing it costs and needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megabatch

# Not jinja2 and what else torch itself requires. numpy is only optional to torch.
EXTRAS = (
    "PIL fontTools matplotlib numpy open_clip psutil pyarrow rich safetensors scipy sklearn "
    "tensorboard timm torchvision triton webdataset"
)

TORCH_ALONE = f"""
import sys, time, warnings

class Hiding:  # another finder, for which the packages are not installed
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in {EXTRAS.split()}
        return None if hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Hiding, sys.meta_path)
warnings.simplefilter("ignore")
import torch
started = time.process_time()
import megabatch
megabatch.evaluation.retrieval_metrics, megabatch.losses  # without an import of their own
for name in megabatch.__all__:
    getattr(megabatch, name)
taken = time.process_time() - started
x = torch.randn(6, 3, requires_grad=True)
megabatch.GradientCache((torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)),
                        lambda a, b: megabatch.ClipLoss()(a, b, 10.0), 2)(x, x).backward()
megabatch.retrieval_metrics(x.detach(), x.detach(), ks=(1,))
print(taken)
try:
    import megabatch.data.order
except ModuleNotFoundError as error:
    print(error)
"""


def run() -> tuple[float, str]:
    """Seconds that the core's import took, and what an import of another part ended in."""
    ended = subprocess.run([sys.executable, "-c", TORCH_ALONE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    taken, *rest = ended.stdout.splitlines()
    return float(taken), "".join(rest)


def test_the_core_works_with_torch_alone_and_imports_quickly() -> None:
    taken, refused = run()
    assert "No module named 'numpy'" in refused  # the core would have been refused it as well
    # Seconds of this process's own work beyond importing torch. In one of three tries: beside
    # others on the same core, work takes more of a processor's time too.
    assert taken < 0.5 or any(run()[0] < 0.5 for _ in range(2))


def imports_of(source: str, modules: set[str]) -> set[str]:
    """The modules that a module imports anywhere: inside functions and for type checkers too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & modules) or {str(node.module)}
    return found & modules


def import_graph() -> dict[str, set[str]]:
    """By module of the package, the modules of the package that it imports."""
    package = Path(megabatch.__file__).parent
    sources = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return {name: imports_of(source, set(sources)) for name, source in sources.items()}


def circles(graph: dict[str, set[str]]) -> Iterator[str]:
    """The nodes that reach themselves."""
    for start in graph:
        reached: set[str] = set()
        new = graph[start]
        while new:
            reached |= new
            new = {after for node in new for after in graph.get(node, ())} - reached
        if start in reached:
            yield start


def test_imports_point_one_way() -> None:
    """Between modules, and between packages."""
    modules, packages = import_graph(), dict[str, set[str]]()
    for module, imported in modules.items():
        name, *others = (".".join(one.split(".")[:2]) for one in (module, *imported))
        packages.setdefault(name, set()).update(others)
    for name, others in packages.items():
        others.discard(name)
    assert [*circles(modules), *circles(packages)] == []


@pytest.mark.parametrize(
    "source", ["import p.b", "from p import b", "def f():\n    from p.b import name"]
)
def test_circles_would_be_noticed(source: str) -> None:
    modules = {"p", "p.a", "p.b"}
    graph = {"p.a": imports_of(source, modules), "p.b": imports_of("from p.a import x", modules)}
    assert sorted(circles(graph)) == ["p.a", "p.b"]
