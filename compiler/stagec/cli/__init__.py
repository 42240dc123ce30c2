"""The command line, `stagec COMMAND ...`: a module for each command, whose docstring says what it does.

A module has `arguments`, which declares the command's options (`--json` is declared for all), and `run`, which does
the work: it returns the exit status, None for 0, and raises StagecError for a user's mistake. Every command imports
what it needs when it runs, so that planning needs nothing but pydantic; of one that Bazel keeps a worker for, `preload`
imports all that can be imported before. Exit status: 0 when all is well, 2 for a user's mistake (explained on stderr),
1 for anything else: `explain` or `diff` found a difference, `verify` refuses. `verify` has 3 for a bundle that is
whole, where it was given no key to check a signature with.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from stagec.core.errors import StagecError, missing_package, printable

COMMANDS = (
    "autotune",
    "baseline",
    "bench",
    "bundle",
    "compile",
    "describe-device",
    "describe-weights",
    "diff",
    "explain",
    "explain-load",
    "export",
    "extract",
    "golden",
    "image",
    "init",
    "inspect",
    "locate",
    "plan",
    "profile",
    "provenance",
    "pull",
    "push",
    "rebuild",
    "report",
    "reproduce",
    "run",
    "schema",
    "sign",
    "size",
    "strip",
    "stub",
    "targets",
    "verify",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (None: the process's) and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[1:2] == ["--worker_template"]:
        from stagec.worker import template

        module = importlib.import_module(f"stagec.cli.{given[0].replace('-', '_')}")
        return template.serve(int(given[2]), module.preload, lambda words: main([given[0], *words]))
    parser = argparse.ArgumentParser(
        prog="stagec",
        description="Builds JAX functions ahead of time.",
        epilog="An argument @FILE stands for the arguments in FILE, one a line.",
        fromfile_prefix_chars="@",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    # The modules of the others are not imported where the command is the first word, as it is in a build's actions.
    for name in [name for name in COMMANDS if name in given[:1]] or COMMANDS:
        module = importlib.import_module(f"stagec.cli.{name.replace('-', '_')}")
        summary = module.__doc__
        subparser = commands.add_parser(name, help=summary, description=summary)
        subparser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
        module.arguments(subparser)
        if hasattr(module, "preload"):
            subparser.add_argument("--profile", help="write the seconds of each phase to this file, as JSON")
            subparser.add_argument("--declared", action="append", help="a file that Bazel expects; may be repeated")
        subparser.set_defaults(run=module.run)
    options = parser.parse_args(given)
    try:
        return (_profiled(options, given[0]) if getattr(options, "profile", None) else options.run(options)) or 0
    except StagecError as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        sentence = missing_package(error, f"stagec {given[0]}")
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        return 2


def _profiled(options: argparse.Namespace, command: str) -> int | None:
    from stagec.cli.files import write_whole
    from stagec.core import phases

    phases.start()
    status: int | None = options.run(options)
    if not status:
        artifact = Path(options.profile).name.removesuffix(".profile.json")
        write_whole(options.profile, phases.report(command, artifact).encode())
    return status
