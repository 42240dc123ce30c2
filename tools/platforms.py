"""What the rules know of the compiler: its platforms, what planning imports, and the variables of actions.

usage: python tools/platforms.py [--write]

Prints rules/private/platforms.bzl as it should be, or writes it. tests/core/test_platforms.py compares the two. It
plans manifests, so the Python that runs it has the packages of planning.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "rules" / "private" / "platforms.bzl"
COMPILER = ROOT / "compiler"
_PLANNING = """
import json, sys
from stagec.cli import main
status = [main(["action", "plan", path]) for path in sys.argv[1:]]
modules = {name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}
json.dump({"status": status, "modules": modules}, sys.stderr)
"""
_BROKEN = '[manifest]\nname = "x"\n[functions.f]\nentry = "a:b"\nargs = ["f33[2"]\nplatform = ""\n'
_HEAD = '''"""What Bazel knows of the compiler. tools/platforms.py writes this file; do not edit it."""

# What compiles for a platform besides the toolchain. An executable names the one that it needs, and no other, so that
# Bazel fetches a plugin when an executable of its platform is built.
'''


def planning() -> dict[str, str]:
    """Return the modules that a process imports to plan a good manifest and a broken one, with their files."""
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder, "broken.toml")
        broken.write_text(_BROKEN, "utf-8")
        done = subprocess.run(
            [sys.executable, "-B", "-c", _PLANNING, ROOT / "examples" / "digits" / "digits.toml", broken],
            env={"PYTHONPATH": os.pathsep.join([str(COMPILER), *sys.path])},
            capture_output=True,
            text=True,
            check=True,
        )
    answer = json.loads(done.stderr.splitlines()[-1])
    if answer["status"] != [0, 2]:
        raise ValueError(f"planning ended with {answer['status']}, not with [0, 2]:\n{done.stderr}")
    return dict(answer["modules"])


def text() -> str:
    """Return the file."""
    builds = COMPILER / "stagec" / "core" / "builds"
    platforms = runpy.run_path(str(builds / "platforms.py"))["PLATFORMS"]
    environment = runpy.run_path(str(builds / "actions.py"))["ENVIRONMENT"]
    plugins, mnemonics = [], []
    for name, platform in platforms.items():
        label = f'Label("@stagec_{name}//:environment")' if platform.plugins else "None"
        plugins.append(f'    "{name}": {label},')
        mnemonics.append(f'    "{name}": "StagecCompile{name.capitalize() if platform.plugins else ""}",')
    amd = [f'    "{name}",' for name in tomllib.loads((ROOT / "manifests" / "targets" / "amd.toml").read_text("utf-8"))]
    files = [Path(file) for module, file in planning().items() if module.split(".")[0] == "stagec"]
    sources = {file.relative_to(COMPILER).as_posix() for file in files} | {"stagec/__main__.py", "stagec/releases.toml"}
    for name, platform in platforms.items():  # a manifest that names no such target imports no module of it
        sources |= {f"stagec/hardware/{name}.py", f"stagec/targets/{platform.catalog}"}
    tables = (
        ["PLUGINS = {", *plugins, "}"],
        ["# Mnemonics of the actions that compile.", "MNEMONICS = {", *mnemonics, "}"],
        ["# The AMD devices: the name of a rehearsal's target says no platform.", "AMD_DEVICES = [", *amd, "]"],
        [
            "# What planning reads. A change in one of these files plans every manifest again, and a change in any",
            "# other file of the compiler does not.",
            "PLANNING = [",
            *(f'    "{path}",' for path in sorted(sources)),
            "]",
        ],
        [
            "# The variables of actions that change what a command does.",
            "ENVIRONMENT = {",
            *(f'    "{name}": "{value}",' for name, value in environment.items()),
            "}",
        ],
    )
    return _HEAD + "\n\n".join("\n".join(table) for table in tables) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text(), "utf-8")
    else:
        sys.stdout.write(text())
