"""Show what differs in what two artifacts are made from."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stagec.cli.files import Answer, split
from stagec.cli.options import add_lists, add_manifest_import_roots, add_plugins


def arguments(parser: argparse.ArgumentParser) -> None:
    what = "a bundle (.aot), executable (.xla), exported artifact (.exported) or description (.json)"
    parser.add_argument("first", help=f"{what}; or a manifest (.toml) for what would be built now")
    parser.add_argument("second", help="another artifact of the same kind, a bundle that has one, or a manifest")
    add_manifest_import_roots(parser)
    add_plugins(parser)
    what = "an environment that compiles executables of the inputs that a Bazel target names: Python, and its path"
    add_lists(parser, {"--environment NAME=PYTHON=PATH": what})


def run(options: argparse.Namespace) -> Answer:
    from stagec.reports import explanation

    # What a plugin's executables are made from is its version too; but tracing would import it, and show that.
    packages = list(sys.path)
    plugins = {platform: Path(folder).absolute() for platform, folder in (split(text, 2) for text in options.plugin)}
    sys.path += map(str, plugins.values())
    environments = {name: (python, path) for name, python, path in (split(text, 3) for text in options.environment)}
    roots = options.import_root or ["."]
    report = explanation.explain(options.first, options.second, roots, packages, plugins, environments, True)
    return Answer(report, explanation.as_text(report), 0 if report["equal"] else 1)
