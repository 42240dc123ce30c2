"""Write the files with which a Bazel workspace builds a function: manifest, BUILD, and lines for MODULE.bazel."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

from stagec.cli.files import print_json, print_text
from stagec.core.errors import Problem, StagecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="FILE.py:FUNCTION", help="what to build, such as models/net.py:predict")
    parser.add_argument(
        "--args", metavar="TOML", help='the positional arguments, as in a manifest: \'[{ w = "f32[3]" }, "f32[n,3]"]\''
    )
    parser.add_argument(
        "--workspace",
        metavar="FOLDER",
        help="the workspace, which may be empty; FILE.py is relative to it (default: the one that this folder is in)",
    )
    parser.add_argument(
        "--stagec",
        metavar="FOLDER",
        help="the checkout of stagec that the workspace uses (default: this one, or ../stagec)",
    )


def run(options: argparse.Namespace) -> None:
    from stagec.manifest import inference, workspace

    # Without "..", for files are looked for below it.
    here = Path(os.path.normpath(Path(options.workspace or ".").absolute()))
    if not here.is_dir():
        raise StagecError(Problem(options.workspace, "", "no such folder", "make it, or name another one"))
    root = here if options.workspace else workspace.root_of(here)
    if (root / "rules" / "private" / "manifest.bzl").is_file():
        what = f"{root} is stagec's own checkout"
        raise StagecError(Problem("", "", what, "name the folder of your models: --workspace ../mine"))
    file, name = _named(options.function)
    path = Path(os.path.normpath(here / file))
    if not path.is_relative_to(root):
        raise StagecError(
            Problem(file, "", f"it is not in the workspace {root}", "name the workspace with --workspace")
        )
    found = inference.function(root, path.relative_to(root).as_posix(), name)
    if options.args:
        found = replace(found, avals="", dimensions=inference.dimensions(_args(options.args)))
    stagec = workspace.relative(Path(options.stagec).absolute(), root) if options.stagec else _checkout(root)
    changes, target = workspace.plan(root, found, options.args or "", stagec, _reads_modules(root))
    done = workspace.write(root, changes)
    command = f"{_bazel(root, stagec)} build {target}"
    if options.json:
        rest = {"add": changes.told, "first": changes.advice, "then": command}
        print_json({"workspace": str(root), "files": done, **rest})
        return
    lines = [f"{what:<8}  {written}" for written, what in done.items()]
    for told, text in changes.told.items():
        lines += ["", f"Add this to {told}:", *(f"  {line}" for line in text.splitlines())]
    if changes.advice:
        lines += ["", "First:", *(f"  {one}" for one in changes.advice)]
    in_workspace = "" if Path.cwd() == root else f" in {root}"
    print_text("\n".join([*lines, "", f"{'Then' if changes.advice else 'Next'}{in_workspace}:", f"  {command}", ""]))


def _named(text: str) -> tuple[str, str]:
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        what = f'"{text}" does not name a function'
        raise StagecError(Problem("", "", what, "write FILE.py:FUNCTION, such as models/net.py:predict"))
    return file, name


def _args(text: str) -> object:
    """Return the trees of avals that `--args` has."""
    try:
        found = tomllib.loads(f"args = {text}")["args"]
    except tomllib.TOMLDecodeError as error:
        raise StagecError(
            Problem("--args", "", f"not a value of TOML: {error}", "write for example '[\"f32[n,3]\"]'")
        ) from None
    if not isinstance(found, list):
        raise StagecError(
            Problem(
                "--args",
                "",
                "a list is wanted, with a tree of avals for each argument",
                "write for example '[\"f32[n,3]\"]'",
            )
        )
    return found


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


def _bazel(root: Path, stagec: str) -> str:
    found = next((program for program in _programs() if shutil.which(program)), None)
    return found or os.path.normpath(f"{stagec}/bazelw")
