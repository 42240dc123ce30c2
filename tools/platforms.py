"""The rules' table of platforms, from compiler/stagec/core/builds/platforms.py.

usage: python3 tools/platforms.py [--write]

Prints rules/private/platforms.bzl as it should be, or writes it. tests/core/test_platforms.py compares the two.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "rules" / "private" / "platforms.bzl"
_HEAD = '''"""What Bazel knows of each platform. tools/platforms.py writes this file; do not edit it."""

# What compiles for a platform besides the toolchain. An executable names the one that it needs, and no other, so that
# Bazel fetches a plugin when an executable of its platform is built.
'''


def text() -> str:
    """Return the file."""
    platforms = runpy.run_path(str(ROOT / "compiler" / "stagec" / "core" / "builds" / "platforms.py"))["PLATFORMS"]
    plugins, mnemonics = [], []
    for name, platform in platforms.items():
        label = f'Label("@stagec_{name}//:environment")' if platform.plugin else "None"
        plugins.append(f'    "{name}": {label},')
        mnemonics.append(f'    "{name}": "StagecCompile{name.capitalize() if platform.plugin else ""}",')
    plugins = ["PLUGINS = {", *plugins, "}"]
    planning = [f"stagec/{part}/{name}.py" for part in ("hardware", "manifest") for name in platforms]
    planning += [f"stagec/targets/{platform.catalog}" for platform in platforms.values()]
    sources = [
        "# What planning reads of each platform.",
        "PLANNING = [",
        *(f'    "{path}",' for path in sorted(planning)),
        "]",
    ]
    mnemonics = ["# Mnemonics of the actions that compile.", "MNEMONICS = {", *mnemonics, "}"]
    return _HEAD + "\n".join([*plugins, "", *mnemonics, "", *sources]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text(), "utf-8")
    else:
        sys.stdout.write(text())
