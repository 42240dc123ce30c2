"""What an action pays for its packages, by how Bazel learns of them: processor time of Bazel's server.

The actions do nothing else. stagec's packages are a directory; the table in docs/remote-packages.md comes from here.
"""

from __future__ import annotations

import os
import shutil
import statistics
from pathlib import Path

from benchmarks.environment import run_installer
from benchmarks.measuring import Options, Row
from tests.building import COMPILER
from tests.nested import NestedBazel

_ACTIONS = 60
_DECLARED = {
    "in the image": "[]",
    "as a directory": '["packages/site-packages"]',
    "as files": '[":files"]',
    "as a tree artifact": '[":tree"]',
}
_BUILD = """load(":defs.bzl", "actions", "tree")

filegroup(
    name = "files",
    srcs = glob(["packages/site-packages/**"]),
)

tree(
    name = "tree",
    src = "packages/site-packages",
)
"""
_DEFS = """def _tree_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    command = "cp -r %s/. %s" % (ctx.file.src.path, out.path)
    ctx.actions.run_shell(outputs = [out], inputs = [ctx.file.src], command = command)
    return [DefaultInfo(files = depset([out]))]

tree = rule(
    implementation = _tree_impl,
    attrs = {"src": attr.label(allow_single_file = True)},
)

def _actions_impl(ctx):
    outputs = []
    for number in range(ctx.attr.count):
        out = ctx.actions.declare_file("%s.%d" % (ctx.label.name, number))
        command = "echo %d > %s" % (number, out.path)
        ctx.actions.run_shell(outputs = [out], inputs = ctx.files.packages, command = command)
        outputs.append(out)
    return [DefaultInfo(files = depset(outputs))]

actions = rule(
    implementation = _actions_impl,
    attrs = {
        "count": attr.int(),
        "packages": attr.label_list(allow_files = True),
    },
)
"""


def measure(options: Options) -> list[Row]:
    """Return a row for each way and kind of build: seconds of an action beyond those of one whose image has all."""
    bazel = NestedBazel(options.folder, options.folder / "workspace")
    packages = bazel.root / "packages"
    run_installer(COMPILER / "requirements.lock", packages, "--trimmed")
    targets = {how: f"actions{number}" for number, how in enumerate(_DECLARED)}
    text = "".join(
        f'\nactions(\n    name = "{targets[how]}",\n    count = {_ACTIONS},\n    packages = {packages},\n)\n'
        for how, packages in _DECLARED.items()
    )
    files = {"BUILD": _BUILD + text, "defs.bzl": _DEFS, "WORKSPACE": "", "MODULE.bazel": ""}
    for name, written in files.items():
        (bazel.root / name).write_text(written)
    cache = options.folder / "cache"
    kinds = {
        "without a cache": ["--spawn_strategy=local"],
        "in sandboxes": ["--spawn_strategy=sandboxed"],
        "from a full cache": ["--spawn_strategy=local", f"--disk_cache={cache}"],
    }
    try:
        rows = []
        for kind, words in kinds.items():
            seconds = {how: _seconds(bazel, target, words, options.rounds) for how, target in targets.items()}
            shutil.rmtree(cache, ignore_errors=True)
            least = statistics.median(seconds["in the image"])
            for how, some in seconds.items():
                more = statistics.median(some) - least
                rows.append(Row(f"action with packages {how}, {kind}", "", more, None, {how: some}, "s"))
        return rows
    finally:
        bazel.run("shutdown")


def _seconds(bazel: NestedBazel, target: str, words: list[str], rounds: int) -> list[float]:
    """Build a target once for nothing, and then again each time; return the seconds of the server by action."""
    seconds = []
    for _ in range(rounds + 1):
        bazel.run("clean")
        prepared = bazel.run("build", "tree", *words)
        if prepared.returncode:
            raise RuntimeError(prepared.stderr)
        before = _server_seconds(bazel)
        done = bazel.run("build", target, *words)
        if done.returncode:
            raise RuntimeError(done.stderr)
        seconds.append((_server_seconds(bazel) - before) / _ACTIONS)
    return seconds[1:]


def _server_seconds(bazel: NestedBazel) -> float:
    """The processor seconds that Bazel's server has had."""
    process = bazel.run("info", "server_pid").stdout.split()[-1]
    fields = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
