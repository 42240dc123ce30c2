"""Show what differs in what two artifacts are made from; or what of a bundle runs here, or what JAX's cache missed."""

from __future__ import annotations

import sys
from pathlib import Path

from stagec.cli.files import Answer, Options, pair, read_text, split
from stagec.cli.options import MANIFEST_IMPORT_ROOTS, PLUGINS, only_with
from stagec.core.messages.errors import Problem, StagecError

OPTIONS = {
    "first": "a bundle (.aot), executable (.xla), exported artifact (.exported) or description (.json); or a "
    "manifest (.toml) for what would be built now",
    "[second]": "another artifact of the same kind, a bundle that has one, or a manifest. Without it, the first is a "
    "bundle: what of it runs on this machine, why the rest does not, and the weights that it has",
    **MANIFEST_IMPORT_ROOTS,
    **PLUGINS,
    "[--environment NAME:PYTHON:PATH]...": "an environment that compiles executables of the inputs that a "
    "Bazel target names: Python, and its path",
    "[--function NAME]...": "of a bundle alone: one signature",
    "[--target NAME]": "of a bundle alone: the target to run, as for stagec.load",
    "[--executable-only]": "of a bundle alone: as policy='executable_only' of stagec.load: compile nothing",
    "[--measured]": "of a bundle alone: as policy='measured' of stagec.load: take what an older jaxlib made, where "
    "it was measured to have the same bits; with --executable-only, as 'measured_only'",
    "[--log LOG]": "what a program wrote to stderr with JAX_LOGGING_LEVEL=DEBUG; the first is the folder that "
    "aot_jax_cache wrote: which of its entries the program missed, and what of their keys differs",
}


def run(options: Options) -> Answer:
    alone = options.second is None and options.log is None
    only_with("two artifacts", options.second, options, "import_root", "plugin", "environment")
    only_with("a bundle alone", alone, options, "function", "target", "executable_only", "measured")
    only_with("one folder", options.second is None, options, "log")
    if options.log is not None:
        return _missed(options.first, options.log)
    return _runs(options) if alone else _compared(options)


def _compared(options: Options) -> Answer:
    from stagec.audit import explanation

    # What a plugin's executables are made from is its version too; but tracing would import it, and show that.
    packages = list(sys.path)
    plugins = {platform: Path(folder).absolute() for platform, folder in map(pair, options.plugin)}
    sys.path += map(str, plugins.values())
    environments = {name: (python, path) for name, python, path in (split(text, 3) for text in options.environment)}
    roots = options.import_root or ["."]
    report = explanation.explain(options.first, options.second, roots, packages, plugins, environments, True)
    return Answer(report, explanation.as_text(report), 0 if report["equal"] else 1)


def _runs(options: Options) -> Answer:
    from stagec.core.messages.refusal import LoadError
    from stagec.loader import load
    from stagec.loader.selection import Policy

    bundle = options.first
    policy: Policy = "executable_only" if options.executable_only else "allow_compile"
    if options.measured:
        policy = "measured_only" if options.executable_only else "measured"
    try:
        selections = load.explain(bundle, options.target, policy).selections()
    except LoadError as error:
        what = str(error).removeprefix(f"{bundle}: ")
        write = "" if bundle.endswith(".aot") else "give a bundle (.aot), or two artifacts to compare"
        raise StagecError(Problem(bundle, "", f"{what} ({error.code})", write)) from error
    known = [selection.function for selection in selections]
    for name in options.function:
        if name not in known:
            raise StagecError(Problem(bundle, "", f"no function {name!r}", f"write one of {', '.join(known)}"))
    selections = [each for each in selections if each.function in (options.function or known)]
    value = {"bundle": bundle, "functions": [selection.to_plain() for selection in selections]}
    text = "".join(selection.as_text() for selection in selections)
    return Answer(value, text, 0 if all(selection.chosen for selection in selections) else 1)


def _missed(folder: str, log: str) -> Answer:
    from stagec.jaxcache import jax_entries, jax_misses

    index = str(Path(folder, jax_entries.INDEX))
    try:
        entries = jax_entries.read(read_text(index))
    except ValueError as error:
        raise StagecError(Problem(index, "", str(error), "give a folder that aot_jax_cache wrote")) from error
    lookups = list(jax_misses.read(read_text(log)))
    if not lookups:
        what = "it has no keys of JAX's compilation cache"
        write = "run the program with JAX_LOGGING_LEVEL=DEBUG and JAX_COMPILATION_CACHE_DIR, and keep its stderr"
        raise StagecError(Problem(log, "", what, write))
    misses = [jax_misses.explain(lookup, entries) for lookup in lookups if not lookup.hit]
    hits = len(lookups) - len(misses)
    text = "".join(miss.as_text() for miss in misses) + f"{hits} of {len(lookups)} found\n"
    return Answer({"hits": hits, "misses": [miss.to_plain() for miss in misses]}, text, 1 if misses else 0)
