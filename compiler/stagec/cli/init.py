"""Write the files that build a function: its manifest, and for Bazel BUILD and lines for MODULE.bazel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.cli.files import Answer, Options
from stagec.cli.options import value
from stagec.core.messages.errors import Problem, StagecError, mistake

if TYPE_CHECKING:
    from stagec.manifest.inference import Function

OPTIONS = {
    "functions ...": value("what to build, such as net.py:predict or net.py:object.method", metavar="FILE.py:FUNCTION"),
    "[--name NAME]": "what the manifest calls the function, if it has another one of its name (default: its own)",
    "[--args TOML]": 'the positional arguments, as in a manifest: \'[{ w = "f32[3]" }, "f32[n,3]"]\'',
    "[--workspace FOLDER]": "the workspace, which may be empty; FILE.py is relative to it (default: the one that "
    "this folder is in)",
    "[--bazel {yes,no}]": value("no: write the manifest alone, for stagec build (default: yes)", "yes"),
    "[--stagec FOLDER]": "the checkout of stagec that the workspace uses (default: this one, or ../stagec)",
}


def run(options: Options) -> Answer:
    from stagec.local.building import MARKS
    from stagec.manifest import inference, workspace

    # Without "..", for files are looked for below it.
    here = Path(os.path.normpath(Path(options.workspace or ".").absolute()))
    if not here.is_dir():
        raise StagecError(Problem(options.workspace, "", "no such folder", "make it, or name another one"))
    marks = MARKS if options.bazel == "no" else workspace.ENTRY_POINTS
    root = here if options.workspace else workspace.root_of(here, marks)
    if (root / "rules" / "private" / "manifest.bzl").is_file():
        raise mistake(f"{root} is stagec's own checkout", "name the folder of your models: --workspace ../mine")
    for option in ("--args", "--name"):
        if len(options.functions) > 1 and getattr(options, option[2:]):
            what = f"it is about one function, and {len(options.functions)} are named"
            raise StagecError(Problem(option, "", what, "run the command once for each"))
    functions = [_function(root, here, text) for text in options.functions]
    if options.args:
        dimensions = inference.dimensions(_args(options.args))
        functions = [replace(function, avals="", dimensions=dimensions) for function in functions]
    if options.name:
        functions = [replace(function, called=_manifests_name(options.name)) for function in functions]
    stagec = workspace.relative(Path(options.stagec).absolute(), root) if options.stagec else _checkout(root)
    modules = None if options.bazel == "no" else _reads_modules(root)
    workspace.check(root, functions)
    done: dict[str, str] = {}
    paste: dict[str, str] = {}
    advice: list[str] = []
    targets: list[str] = []
    for function in functions:  # each finds the files of those before it
        changes, target = workspace.plan(root, function, options.args or "", stagec, modules)
        done |= {file: what for file, what in workspace.write(root, changes).items() if file not in done}
        for file, text in changes.paste.items():
            new = [line for line in text.splitlines(keepends=True) if line not in paste.get(file, "")]
            paste[file] = paste.get(file, "") + "".join(new)
        advice += changes.advice
        targets.append(target)
    # A lock comes before the build, and what it waits for before that.
    advice = sorted(dict.fromkeys(advice), key=lambda step: (".in: " not in step, not step.startswith("bazel ")))
    targets = [*dict.fromkeys(targets)]
    command = f"{_bazel(stagec)} build {' '.join(targets)}"
    if modules is None:
        command = " && ".join(f"stagec build {manifest}" for manifest in targets)
    value = {"workspace": str(root), "files": done, "add": paste, "first": advice, "then": command}
    lines = [f"{what:<8}  {written}" for written, what in done.items()]
    for file, text in paste.items():
        lines += ["", f"Add this to {file}:", *(f"  {line}" for line in text.splitlines())]
    if advice:
        lines += ["", "First:", *(f"  {step}" for step in advice)]
    in_workspace = "" if Path.cwd() == root else f" in {root}"
    lines += ["", f"{'Then' if advice else 'Next'}{in_workspace}:", f"  {command}", ""]
    return Answer(value, "\n".join(lines))


def _function(root: Path, here: Path, text: str) -> Function:
    """Read the function that a word of the command line names. here: what its file is relative to."""
    from stagec.manifest import inference

    file, name = _named(text)
    path = Path(os.path.normpath(here / file))
    if not path.is_relative_to(root):
        what = f"it is not in the workspace {root}"
        raise StagecError(Problem(file, "", what, "name the workspace with --workspace"))
    return inference.function(root, path.relative_to(root).as_posix(), name)


def _manifests_name(name: str) -> str:
    from stagec.manifest.tables import NAME

    if not re.fullmatch(NAME, name):
        write = "write letters, digits, _ and -, not starting with a digit or -"
        raise StagecError(Problem("--name", "", f'"{name}" is not a name', write))
    return name


def _named(text: str) -> tuple[str, str]:
    file, colon, name = text.rpartition(":")
    if not colon or not name.isascii() or not all(map(str.isidentifier, name.split("."))) or name.count(".") > 1:
        what = f'"{text}" does not name a function'
        raise mistake(what, "write FILE.py:FUNCTION, such as models/net.py:predict")
    return file, name


def _args(text: str) -> object:
    """Return the trees of avals that `--args` has."""
    from stagec.manifest import toml

    write = "write for example '[\"f32[n,3]\"]'"
    try:
        trees = toml.parse(f"args = {text}")["args"]
    except ValueError as error:
        raise StagecError(Problem("--args", "", f"not a value of TOML: {error}", write)) from None
    if not isinstance(trees, list):
        raise StagecError(Problem("--args", "", "expected a list, with a tree of avals for each argument", write))
    return trees


def _checkout(root: Path) -> str:
    """Return where the workspace finds stagec: the checkout that this file is of, else beside the workspace."""
    from stagec.manifest import workspace

    checkout = Path(__file__).resolve().parents[3]
    return workspace.relative(checkout, root) if (checkout / "rules" / "defs.bzl").is_file() else "../stagec"


def _reads_modules(root: Path) -> bool:
    """Return whether the workspace's Bazel reads MODULE.bazel: one that is there says so, else Bazel's version."""
    there = [(root / name).is_file() for name in ("MODULE.bazel", "WORKSPACE")]
    if there[0] != there[1]:
        return there[0]
    program = next(filter(None, map(shutil.which, _programs())), None)
    if program is None:
        return True
    said = subprocess.run([program, "--version"], cwd=root, check=False, capture_output=True, text=True).stdout
    version = re.search(r"(\d+)\.\d", said)
    return version is not None and int(version[1]) >= 7  # Debian's Bazel 4 has no version


def _programs() -> list[str]:
    """What bazelw takes, in its order."""
    return [*filter(None, [os.environ.get("BAZEL")]), "bazelisk", "bazel"]


def _bazel(stagec: str) -> str:
    on_path = next((program for program in _programs() if shutil.which(program)), None)
    return on_path or os.path.normpath(f"{stagec}/bazelw")
