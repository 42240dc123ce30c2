"""Build a bundle again from a checkout of its sources, compare it, and write a statement of this build."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from stagec.cli.files import Answer, Options, write_whole
from stagec.cli.options import value
from stagec.core.messages.errors import mistake

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "--statement STATEMENT": "its in-toto statement (.intoto.json)",
    "[--root ROOT]": value("a clean checkout of the sources (default: this folder)", "."),
    "[--target TARGET]": "the bundle's label (default: as the manifest's package has it)",
    "[--bazel BAZEL]": "what starts Bazel (default: ./bazelw of the checkout if it has one, else bazelisk or bazel)",
    "[--output OUTPUT]": "where to write the statement of this build (default: NAME.rebuilt.intoto.json in this "
    "folder)",
}


def run(options: Options) -> Answer:
    from stagec.audit import rebuilding

    root = Path(options.root)
    rebuilt = rebuilding.rebuild(options.bundle, options.statement, root, _bazel(options, root), options.target)
    stem = Path(options.statement).name.removesuffix(".intoto.json")
    output = options.output or f"{stem}.rebuilt.intoto.json"
    if rebuilt.same:
        write_whole(output, rebuilt.statement)
    value = {"same": rebuilt.same, "members": rebuilt.members, "made_from": list(rebuilt.made_from)}
    others = "".join(f"  {line}\n" for line in rebuilt.made_from)
    made_from = f"made from other things\n{others}" if others else "made from the same\n" * rebuilt.same
    if not rebuilt.same:
        text = f"{options.bundle}: built again, and another\n{rebuilt.comparison}{made_from}"
        return Answer({**value, "statement": None}, text, 1)
    text = f"{options.bundle}: built again, and the same: {rebuilt.members} members, byte for byte\n"
    text += f"{made_from}wrote {output}: sign it with your key\n"
    return Answer({**value, "statement": output}, text)


def _bazel(options: Options, root: Path) -> list[str]:
    if options.bazel:
        return shlex.split(options.bazel)
    if (root / "bazelw").is_file():
        return [str((root / "bazelw").resolve())]
    for program in ("bazelisk", "bazel"):
        bazel = shutil.which(program)
        if bazel:
            return [bazel]
    raise mistake("there is no bazelisk or bazel on PATH", "name one: --bazel /path/to/bazel")
