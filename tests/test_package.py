"""The package as a whole: what importing it costs and needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import megabatch

ROOT = Path(__file__).parents[1]

# Not jinja2 and what else torch itself requires. numpy is only optional to torch.
EXTRAS = (
    "PIL fontTools matplotlib numpy open_clip psutil pyarrow rich safetensors scipy sklearn "
    "tensorboard timm torchvision webdataset"
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
for name in megabatch.__all__:
    getattr(megabatch, name)
taken = time.process_time() - started
x = torch.randn(6, 3, requires_grad=True)
megabatch.GradientCache((torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)),
                        lambda a, b: megabatch.ClipLoss()(a, b, 10.0), 2)(x, x).backward()
megabatch.retrieval_metrics(x.detach(), x.detach(), ks=(1,))
print(taken)
"""


def run(script: str) -> list[str]:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_the_core_works_with_torch_alone_and_imports_quickly() -> None:
    # Seconds of this process's own work beyond importing torch. In one of three tries: beside
    # others on the same core, work takes more of a processor's time too.
    assert any(float(run(TORCH_ALONE)[0]) < 0.5 for _ in range(3))


def test_the_guard_would_notice() -> None:
    script = TORCH_ALONE.replace("import megabatch\n", "import megabatch, megabatch.data.order\n")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ModuleNotFoundError: No module named 'numpy'" in ended.stderr


def test_every_public_name_is_there() -> None:
    for name in megabatch.__all__:
        assert getattr(megabatch, name) is not None


def test_packages_are_there_without_an_import_of_their_own() -> None:
    script = "import megabatch\nprint(megabatch.evaluation.retrieval_metrics, megabatch.losses)"
    assert "retrieval_metrics" in run(script)[0]


def test_the_version_is_the_projects() -> None:
    found = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), flags=re.M)
    assert found is not None
    assert megabatch.__version__ == found[1]


def test_types_are_shipped() -> None:
    assert (Path(megabatch.__file__).parent / "py.typed").exists()
