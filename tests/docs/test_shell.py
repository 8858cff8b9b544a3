"""Every command on every page exists, with the options and values that it is shown with.

Commands are read by the parsers of the programs themselves (megabatch, torchrun, benchmarks and
tools, OpenCLIP's trainer) and do not run: they train for hours, on several GPUs or on data that is
not here. Those of docs/evaluation.md, docs/export.md and docs/recipes.md also run, at small size,
in tests/evaluation/test_docs.py, tests/export/test_run.py and tests/training/test_own_parts.py.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megabatch import options
from megabatch.cli import COMMANDS, main
from megabatch.config import file
from megabatch.training import plan_command
from tests.docs.pages import PAGES, ROOT, blocks

LANGUAGES = ("bash", "console")
#: Words of the shell and of other programs: nothing is known about them here.
OTHERS = {"[", "export", "cd", "scontrol", "done", "hf"}


class Accepted(BaseException):  # no program catches it
    """A program's parser took all options; the program itself must not run."""


def commands(code: str) -> Iterator[list[str]]:
    """The commands of a block in words, without variables, prompts and outputs."""
    if code.startswith("$ "):
        code = code[2:].partition("\n$ ")[0]
        code = re.match(r"(.*\\\n)*.*", code)[0]  # type: ignore[index]
    for name, value in re.findall(r"for (\w+) in (\S+)", code):
        code = re.sub(rf"for {name} in [^;]*; do", "", code).replace(f"${name}", value)
    for line in code.replace("\\\n", " ").splitlines():
        for part in re.split(r"; | && |;$", re.sub(r"(^|\s)#.*", "", line)):
            words = [word for word in shlex.split(part) if word != "..."]
            while words and re.fullmatch(r"\w+=.*", words[0]):  # variables of this command
                del words[0]
            if words:
                yield words


def check(words: Sequence[str]) -> None:
    """Raises an exception unless the command exists and takes these words."""
    program, *rest = words
    if program in ("srun", "unshare"):
        check(rest[rest.index("python") :])
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(rest)
        python = ["python", "-m"] if given.module else ["python"]
        check([*python, given.training_script, *given.training_script_args])
    elif program == "python" and rest[0] == "-m":
        module, *given = (word for word in rest[1:] if word != "--")
        accepts(lambda: runpy.run_module(module, run_name="__main__"), [module, *given])
    elif program == "python":
        script = ROOT / rest[0]
        with pytest.MonkeyPatch.context() as patch:  # it may import from its own folder
            patch.syspath_prepend(str(script.parent))
            accepts(lambda: runpy.run_path(str(script), run_name="__main__"), rest)
    elif Path(program).name == "megabatch":
        accepts(lambda: main(list(rest)), rest) if rest != ["--version"] else None
    elif program == "make":
        targets = [word for word in rest if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets), words
    elif Path(program).name == "pip":
        asked = re.findall(r"(?:\.|\*\.whl\))\[(.*?)\]", " ".join(rest))
        known = (ROOT / "pyproject.toml").read_text()
        assert all(f"\n{extra} = [" in known for one in asked for extra in one.split(",")), words
    else:
        assert program in OTHERS, f"no check for {program}: {words}"


def accepts(program: Callable[[], object], words: Sequence[str]) -> None:
    """Raises an exception unless the program's own parser takes these words."""
    read, make = argparse.ArgumentParser.parse_args, options.make

    def accepted(reader: object) -> object:
        def wrapped(*arguments: object) -> None:
            reader(*arguments)  # type: ignore[operator]
            raise Accepted

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(words))
        patch.setattr(argparse.ArgumentParser, "parse_args", accepted(read))
        for module in (options, file, plan_command):
            patch.setattr(module, "make", accepted(make))
        with contextlib.suppress(Accepted):
            code = program()
            helped = words[-1] == "--help"
            assert (helped, code) == (True, 0), f"exit code {code}: {shlex.join(words)}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(blocks(page, n) for n in LANGUAGES)]
)
def test_commands_exist_with_their_options(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for language in LANGUAGES:
        for code in blocks(page, language):
            if language == "bash":
                subprocess.run(["bash", "-n"], input=code, text=True, check=True)
            for words in commands(code):
                check(words)


def test_the_reference_shows_the_options_of_every_command() -> None:
    shown = "\n".join(blocks("docs/reference/command-line.md", "{help}"))
    assert set(re.findall(r"^megabatch (\w+(?: \w+)?) --help$", shown, re.M)) == set(COMMANDS)


@pytest.mark.parametrize(
    "code",
    [
        "megabatch train --modle ViT-B-32",
        "megabatch eval runs/mine --class-data",
        "megabatch shrink",
        "torchrun --nproc-per-node 2 -m megabatch train --batch 3",
        "torchrun --processes 2 -m megabatch train",
        "srun --exclusive python -m megabatch train --batch 3",
        "python -m megabatch.integrations.open_clip --modle ViT-B-32",
        "python benchmarks/retriever.py --modle bert-base",
        "python tools/gone.py",
        "make quicker",
        "pip install -e '.[trainer]'",
        "for n in 1 2; do python benchmarks/throughput.py --cont $n; done",
        "rm -r runs",
    ],
)
def test_wrong_commands_are_found(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((AssertionError, SystemExit, FileNotFoundError)):
        any(map(check, commands(code)))
