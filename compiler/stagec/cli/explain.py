"""Show what differs in what two artifacts are made from."""

from __future__ import annotations

import sys
from pathlib import Path

from stagec.cli.files import Answer, Options, pair, split
from stagec.cli.options import MANIFEST_IMPORT_ROOTS, PLUGINS

OPTIONS = {
    "first": "a bundle (.aot), executable (.xla), exported artifact (.exported) or description (.json); or a "
    "manifest (.toml) for what would be built now",
    "second": "another artifact of the same kind, a bundle that has one, or a manifest",
    **MANIFEST_IMPORT_ROOTS,
    **PLUGINS,
    "[--environment NAME:PYTHON:PATH]...": "an environment that compiles executables of the inputs that a "
    "Bazel target names: Python, and its path",
}


def run(options: Options) -> Answer:
    from stagec.audit import explanation

    # What a plugin's executables are made from is its version too; but tracing would import it, and show that.
    packages = list(sys.path)
    plugins = {platform: Path(folder).absolute() for platform, folder in map(pair, options.plugin)}
    sys.path += map(str, plugins.values())
    environments = {name: (python, path) for name, python, path in (split(text, 3) for text in options.environment)}
    roots = options.import_root or ["."]
    report = explanation.explain(options.first, options.second, roots, packages, plugins, environments, True)
    return Answer(report, explanation.as_text(report), 0 if report["equal"] else 1)
