"""Run all tests with each minor release of torch that pyproject.toml allows.

    python tools/versions.py --output benchmarks/results/versions.json

Each goes into a virtual environment of its own (7 GB; deleted afterwards unless --keep names a
folder, whose environments are brought up to date): "oldest" has the oldest release series of every
package that is named there, the others a minor release of torch, the Triton and torchvision that
belong to it, and the newest of everything else. uv installs them, as in `make`. Exit code 1 if any
test failed.

What follows -- goes to pytest, as in `... -- tests/similarity -x`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from pytest_runs import ARGUMENTS, ROOT, Place, append, green, run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: What is installed of megabatch; and where torch is not the oldest one.
EXTRAS, NEWER = ("train", "dev"), ("fp8",)


def main(words: Sequence[str] | None = None) -> int:
    """Make the environments and run the tests in them; returns the exit code."""
    own = sys.argv[1:] if words is None else list(words)
    options = _options(own)
    command = shlex.join(["python", "tools/versions.py", *own])
    for cap in pip_constraints():
        print(f"pip's settings have {cap}; they do not apply to these environments", flush=True)
    partial = options.output.with_name(options.output.name + ".partial")
    partial.unlink(missing_ok=True)
    bad = 0
    for name in options.environments or ["oldest", *minor_releases()[1:]]:
        constraints = oldest(requirements()) if name == "oldest" else [f"torch=={name}.*"]
        with _folder(options.keep) as folder:
            begun = time.monotonic()
            extras = EXTRAS if name == "oldest" else EXTRAS + NEWER
            place = Place(str(install(folder / name, constraints, extras)))
            installing = round(time.monotonic() - begun, 1)
            described = place.describe()
            found = run(place, [*ARGUMENTS, *options.arguments], options.limit)
        record: dict[str, Any] = {
            "environment": name,
            "versions": described["versions"],
            "constraints": constraints,
            "installing_seconds": installing,
            **found,
        }
        # At the end in its place: a test compares a page with the committed records.
        append(partial, {"command": command, "machine": described["machine"]}, record)
        bad += not green(record)
        failed = "".join(f"\n  {failure['test']}" for failure in record["failures"])
        print(
            f"{name}, torch {record['versions']['torch']}: {record['passed']} passed, "
            f"{record['failed']} failed, {record['skipped']} skipped in {record['seconds']} s, "
            f"exit code {record['exit_code']}{failed}",
            flush=True,
        )
    partial.replace(options.output)
    return 1 if bad else 0


def requirements() -> list[str]:
    """What megabatch and its extras here require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]


def oldest(required: Iterable[str]) -> list[str]:
    """The oldest release series that each requirement allows, as constraints for pip.

    A bound of two numbers, as 2.8, stands for the last release of its series, which has the first
    one's bugs mended; one of three for that release.
    """
    found = []
    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        for bound in requirement.specifier:
            if bound.operator == ">=":
                series = "" if bound.version.count(".") > 1 else ".*"
                found.append(f"{requirement.name}=={bound.version}{series}")
    return found


def minor_releases() -> list[str]:
    """The minor releases of torch on the package index that pyproject.toml allows, in order."""
    allowed = next(r for r in map(Requirement, requirements()) if r.name == "torch").specifier
    listed = re.search(r"Available versions: (.*)", _pip("index", "versions", "torch"))
    if listed is None:
        raise SystemExit("pip index versions torch: the package index lists no versions")
    versions = allowed.filter(map(Version, listed[1].split(", ")))
    return [f"{major}.{minor}" for major, minor in sorted({v.release[:2] for v in versions})]


def pip_constraints() -> list[str]:
    """Constraints that pip is told by its settings, as on a machine with old drivers."""
    return [line for line in _pip("config", "list").splitlines() if "constraint" in line]


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", *words, "--disable-pip-version-check"]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def install(folder: Path, constraints: Sequence[str], extras: Sequence[str]) -> Path:
    """Make or update an environment with megabatch and its extras; returns its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    file = folder / "constraints.txt"
    file.write_text("\n".join(constraints) + "\n")
    wanted = f"{ROOT}[{','.join(extras)}]"
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
    subprocess.run([*uv, "--constraint", str(file), "--editable", wanted], check=True)
    return python


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.absolute()
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--environments", nargs="+", metavar="NAME", help="oldest, 2.10, ...; by default all"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the environments to stay")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds of a run")
    parser.add_argument("--output", type=Path, required=True, help="record to make")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
