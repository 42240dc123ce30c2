"""Build the bundle of a manifest without Bazel, with the packages of this Python."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stagec.cli.files import Answer, Options, pair, write_asked
from stagec.cli.options import PLUGINS, at_least, value
from stagec.core.messages.errors import StagecError, mistake, printable

if TYPE_CHECKING:
    from stagec.local.building import Local, Wanted
    from stagec.local.pool import Pool

_EVERY = 0.3  # seconds between looks at files

OPTIONS = {
    "manifest": "the manifest, a TOML file",
    "[--output OUTPUT]": "where to write the bundle (default: NAME.aot in this folder)",
    "[--artifacts FOLDER]": "where to write exported artifacts, executables and their descriptions too",
    "[--jax-cache FOLDER]": "where to write JAX's compilation cache, if the manifest has jax_cache",
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
    "[--explain]": "say why each action runs, too: what has changed since this workspace was built",
    "[--watch]": "build again after each edit, until Ctrl-C: the processes that imported JAX stay",
    "[--depfile FILE]": "write what the bundle depends on to this file, as Make and Ninja read it",
}


def run(options: Options) -> Answer:
    from stagec.local.building import Local, Wanted
    from stagec.local.pool import Pool
    from stagec.local.store import Store, default_folder

    wanted = Wanted(
        options.manifest,
        options.root,
        options.import_root,
        options.data,
        options.function,
        options.target,
        dict(map(pair, options.plugin)),
        options.jax_cache is not None,
    )
    with Pool(Store(default_folder())) as pool:
        if options.watch:
            _watch(options, wanted, pool)
        if options.dry_run:
            return _dry_run(Local(wanted, pool, runs=False), options.explain)
        return _build(options, Local(wanted, pool))


def _watch(options: Options, wanted: Wanted, pool: Pool) -> NoReturn:
    """Build after each edit."""
    from stagec.local.building import Local, states

    if options.dry_run:
        raise mistake("--watch builds, and --dry-run does not", "leave one of them out")
    files: list[Path] = []
    written = set[str]()  # it may be below --data
    while True:
        before = states(wanted, files)
        try:
            local = Local(wanted, pool)
            before = states(wanted, local.watched()) | before
            try:
                _build(options, local).tell(options.json)
            finally:
                written |= local.written
            files = local.files()
        except StagecError as error:
            sys.stderr.write(printable(f"{error}\n"))
        sys.stdout.flush()
        while all(
            before.get(path) == now or os.path.realpath(path) in written for path, now in states(wanted, before).items()
        ):
            time.sleep(_EVERY)


def _build(options: Options, local: Local) -> Answer:
    outcome = local.run(options.jobs, options.keep_going)
    for text in (*outcome.said, *outcome.failed):
        sys.stderr.write(printable(text))
    why = {" ".join(action): reasons for action, reasons in outcome.ran.items()}
    answer = {"ran": [*why], "why": why, "kept": outcome.kept}
    explained = "".join(f"{name.removeprefix('action ')}: {', '.join(why[name])}\n" for name in why if options.explain)
    if outcome.failed:
        return Answer({**answer, "output": None}, explained, max(outcome.failed.values()))
    output = options.output or f"{local.plan['bundle']['name']}.aot"
    local.write(output, options.artifacts, options.jax_cache)
    write_asked(options.depfile, local.depfile(output).encode())
    local.written |= {os.path.realpath(options.depfile)} if options.depfile else set()
    digest, size = outcome.made[local.build.bundle]
    return Answer(
        {**answer, "output": output, "bytes": size, "sha256": digest},
        f"{explained}{output}  {size:,} bytes  {len(outcome.ran)} actions ran, {outcome.kept} were kept\n",
    )


def _dry_run(local: Local, explain: bool) -> Answer:
    undone = list(local.runner.undone())
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
        f"{'run' if known else 'maybe':<6}{action.command.split()[-1]:<18}{action.name}"
        f"{'  ' + ', '.join(local.runner.why(action)) if explain and known else ''}\n"
        for action, known in undone
    ]
    return Answer({"actions": value, "run": [action.name for action, _ in undone]}, "".join(lines) or "nothing to do\n")
