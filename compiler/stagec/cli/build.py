"""Build a manifest, or what was rehearsed, without Bazel, with the packages of this Python."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stagec.cli.files import Answer, Options, pair, read_packages, read_text, write_asked
from stagec.cli.options import PLUGINS, REPORT, STATEMENT, at_least, only_with, value
from stagec.core.messages.errors import Problem, StagecError, mistake, printable

if TYPE_CHECKING:
    from stagec.local.building import Local, Wanted
    from stagec.local.pool import Pool
    from stagec.trust.provenance import Environment

_LAYER = re.compile(r"([\w.-]+)\.jax_cache\.tar")
"""The file of a layer, as `aot_programs` names it."""
_EVERY = 0.3  # seconds between looks at files

OPTIONS = {
    "manifest": "the manifest, a TOML file; or the programs.toml of a rehearsal",
    "[--output OUTPUT]": "where to write the bundle (default: NAME.aot in this folder), or of a rehearsal the layer "
    "with JAX's compilation cache (default: programs.jax_cache.tar)",
    "[--artifacts FOLDER]": "where to write exported artifacts, executables and their descriptions too",
    "[--jax-cache FOLDER]": "where to write JAX's compilation cache as a folder, if the manifest has jax_cache",
    "[--function NAME]...": "build only this function: the bundle has no other",
    "[--target NAME]...": "build only for this target: the bundle has no other",
    "[--root FOLDER]": "the workspace, from which functions import (default: the nearest folder above the manifest "
    "with MODULE.bazel, WORKSPACE, pyproject.toml or .git, else this folder)",
    "[--import-root FOLDER]...": "one more folder below which modules are found, relative to the workspace",
    "[--data PATH]...": "a file or folder that tracing reads, relative to the workspace; Python sources are known",
    **PLUGINS,
    "[--remote-cache URL]": "a cache that machines share, with results of stagec build: http://HOST:8080; or https, "
    "grpc, grpcs",
    "[--no-upload]": "only read from the remote cache",
    "[--jobs N]": value("actions at a time (default: the number of cores, and not more than 4)", None, at_least(1)),
    "[--keep-going]": "go on after an error with what does not need what failed",
    "[--dry-run]": "say what would run, and run nothing",
    "[--explain]": "say why each action runs, too: what has changed since this workspace was built",
    "[--watch]": "build again after each edit, until Ctrl-C: the processes that imported JAX stay",
    "[--depfile FILE]": "write what the bundle depends on to this file, as Make and Ninja read it",
    **STATEMENT,
}


def run(options: Options) -> Answer:
    from stagec.local.building import Local, Wanted
    from stagec.local.pool import Pool
    from stagec.local.store import Store, default_folder

    only_with("--statement or --sbom", options.statement or options.sbom, options, "packages")
    only_with("--remote-cache", options.remote_cache, options, "no_upload")
    if options.dry_run and options.remote_cache:
        raise mistake("--dry-run asks no cache, and --remote-cache names one", "leave one of them out")
    wanted = Wanted(
        options.manifest,
        options.root,
        options.import_root,
        options.data,
        options.function,
        options.target,
        dict(map(pair, options.plugin)),
        options.jax_cache is not None,
        named[1] if (named := _LAYER.fullmatch(Path(options.output or "").name)) else "",
        options.remote_cache or "",
        not options.no_upload,
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
    environments = _environments(options, local) if options.statement or options.sbom else []
    outcome = local.run(options.jobs, options.keep_going)
    for text in (*outcome.said, *outcome.failed):
        sys.stderr.write(printable(text))
    why = {" ".join(action): reasons for action, reasons in outcome.ran.items()}
    answer = {"ran": [*why], "why": why, "kept": outcome.kept, "fetched": outcome.fetched}
    explained = "".join(f"{name.removeprefix('action ')}: {', '.join(why[name])}\n" for name in why if options.explain)
    if outcome.failed:
        return Answer({**answer, "output": None}, explained, max(outcome.failed.values()))
    output = options.output or local.output
    local.write(output, options.artifacts, options.jax_cache)
    write_asked(options.depfile, local.depfile(output).encode())
    local.written |= {os.path.realpath(options.depfile)} if options.depfile else set()
    digest, size = outcome.made[local.build.bundle]
    fetched = f", {outcome.fetched} of them from the remote cache" if options.remote_cache else ""
    if environments:
        if _environments(options, local) != environments:
            raise mistake("the packages changed while they were used", "build again")
        _attest(options, local, output, digest, environments)
    return Answer(
        {**answer, "output": output, "bytes": size, "sha256": digest},
        f"{explained}{output}  {size:,} bytes  {len(outcome.ran)} actions ran, {outcome.kept} were kept{fetched}\n",
    )


def _environments(options: Options, local: Local) -> list[Environment]:
    """Return the lists of packages that were given, and what no list has. Raises StagecError for a list of others."""
    from stagec.trust import provenance
    from stagec.trust.provenance import Wheel

    def known(wheel: Wheel) -> tuple[str, str]:
        return provenance.normalized(wheel.name), wheel.version

    here, there = platform.python_version(), dict[tuple[str, str], Wheel]()
    taken = set[str]()
    for wheel in provenance.installed(local.packages):  # Python imports the first of a name
        if (name := known(wheel)[0]) not in taken:
            taken.add(name)
            there[known(wheel)] = wheel
    environments, problems = read_packages(options.packages), []
    for path, environment in zip(options.packages, environments, strict=True):
        lacking = ", ".join(" ".join(known(wheel)) for wheel in environment.wheels if known(wheel) not in there)
        if environment.python != here:
            problems.append(Problem(path, "", f"it is of Python {environment.python}, and this is {here}", REPORT))
        elif lacking:
            problems.append(Problem(path, "", f"it lists what is not installed here: {lacking}", REPORT))
    if problems:
        raise StagecError(*problems)
    listed = {known(wheel) for environment in environments for wheel in environment.wheels}
    others = [wheel for package, wheel in there.items() if package not in listed]
    others += [Wheel(name, "", name, digest) for name, digest in local.unlisted().items()]
    return [*environments, provenance.Environment(here, tuple(others))]


def _attest(options: Options, local: Local, output: str, sha256: str, environments: Sequence[Environment]) -> None:
    """Write the statement and the SBOM of a bundle."""
    from stagec.bundle.archive import Archive
    from stagec.trust import provenance, sbom
    from stagec.trust.attestation import Subject

    subject = Subject.of_layer(output) if local.is_rehearsal else Subject.of(archive := Archive(output), sha256)
    if sha256 != (next(iter(subject.digests.values())) if local.is_rehearsal else archive.sha256()):
        raise mistake(f"{output} is not what this build wrote there", "write each build into a file of its own")
    sources, examined = local.read(), provenance.examined_in(map(read_text, local.examined()))
    manifest = local.manifest, sources.pop(local.manifest)["sha256"]
    made = subject, manifest, local.specs(), sources, environments, examined, provenance.LOCAL
    write_asked(options.statement, provenance.statement(*made).encode())
    write_asked(options.sbom, sbom.bill_of_materials(subject, environments).encode())
    local.written |= {os.path.realpath(path) for path in (options.statement, options.sbom) if path}
    if names := [wheel.name for wheel in environments[-1].wheels]:
        what = f"{len(names)} packages are named by what is installed of them, because no --packages has their wheels"
        sys.stderr.write(printable(f"{Problem(options.statement or options.sbom, '', what, REPORT)}\n"))


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
