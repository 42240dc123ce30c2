"""Build the bundle of a manifest without Bazel, with the packages of this Python."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from stagec.cli.files import Answer, Options, pair, write_asked
from stagec.cli.options import PLUGINS, at_least, value
from stagec.core.messages.errors import printable

if TYPE_CHECKING:
    from stagec.local.building import Local

OPTIONS = {
    "manifest": "the manifest, a TOML file",
    "[--output OUTPUT]": "where to write the bundle (default: NAME.aot in this folder)",
    "[--artifacts FOLDER]": "where to write exported artifacts, executables and their descriptions too",
    "[--function NAME]...": "build only this function: the bundle has no other",
    "[--target NAME]...": "build only for this target: the bundle has no other",
    "[--root FOLDER]": "the workspace, from which functions import (default: the nearest folder above the manifest "
    "with MODULE.bazel, WORKSPACE, pyproject.toml or .git, else this folder)",
    "[--import-root FOLDER]...": "one more folder below which modules are found, relative to the workspace",
    "[--data PATH]...": "a file or folder that tracing reads, relative to the workspace; Python sources are known",
    **PLUGINS,
    "[--jobs N]": value("actions at a time (default: the number of cores, and not more than 4)", None, at_least(1)),
    "[--keep-going]": "go on after an error with what does not need what failed",
    "[--dry-run]": "say what would run, and run nothing",
    "[--depfile FILE]": "write what the bundle depends on to this file, as Make and Ninja read it",
}


def run(options: Options) -> Answer:
    from stagec.local.building import Local, Wanted

    wanted = Wanted(
        options.manifest,
        options.root,
        options.import_root,
        options.data,
        options.function,
        options.target,
        dict(map(pair, options.plugin)),
    )
    local = Local(wanted)
    if options.dry_run:
        return _dry_run(local)
    outcome = local.run(options.jobs, options.keep_going)
    for text in (*outcome.said, *outcome.failed):
        sys.stderr.write(printable(text))
    answer = {"ran": [" ".join(action) for action in outcome.ran], "kept": outcome.kept}
    if outcome.failed:
        return Answer({**answer, "output": None}, "", max(outcome.failed.values()))
    output = options.output or f"{local.plan['bundle']['name']}.aot"
    local.write(output, options.artifacts)
    write_asked(options.depfile, local.depfile(output).encode())
    digest, size = outcome.made[local.build.bundle]
    return Answer(
        {**answer, "output": output, "bytes": size, "sha256": digest},
        f"{output}  {size:,} bytes  {len(outcome.ran)} actions ran, {outcome.kept} were kept\n",
    )


def _dry_run(local: Local) -> Answer:
    undone = [(action, known) for action, known in local.runner.undone()]
    value = [
        {
            "name": action.name,
            "command": action.command,
            "arguments": list(action.arguments),
            "outputs": list(action.outputs),
        }
        for action in local.build.actions
    ]
    lines = [
        f"{'run' if known else 'maybe':<6}{action.command.split()[-1]:<18}{action.name}\n" for action, known in undone
    ]
    return Answer({"actions": value, "run": [action.name for action, _ in undone]}, "".join(lines) or "nothing to do\n")
