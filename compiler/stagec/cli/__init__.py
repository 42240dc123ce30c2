"""The command line, `stagec COMMAND ...`: a module for each command, whose docstring says what it does.

What only Bazel runs is `stagec action NAME ...`, in `stagec.cli.actions`; here its name is one word, "action NAME".

A module has `OPTIONS`, each as usage lines show it with what it is (`--json` is declared for all), and `run`, which
does the work: it returns what is printed, with the exit status (`files.Answer`), or None. It may have `ENVIRONMENT`,
how the environment variables begin that give options too. For a user's mistake it raises StagecError, or lets a Refusal
of the loader pass. Every command imports its modules when it runs, so that planning needs nothing but pydantic. Bazel
keeps workers for some commands: their `preload` imports all that it can before.
Exit status: 0 when all is well, 2 for a user's mistake (explained on stderr), 1 for anything else: `explain` or `diff`
found a difference, `verify` refuses.
`verify` has 3 for a bundle that is whole, where it was given no key to check a signature with. 130 after Ctrl-C, 141
when nobody reads stdout any more, as of programs that a signal ends.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import importlib
import itertools
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from stagec.core.builds import extensions
from stagec.core.builds.version import VERSION
from stagec.core.messages.errors import StagecError, missing_package, nearest, printable
from stagec.core.messages.refusal import Refusal

if TYPE_CHECKING:
    from stagec.cli.files import Answer

GROUPS: Mapping[str, Sequence[str]] = {
    "begin": ("init", "build", "store", "schema", "targets", "describe-device"),
    "look at what was built": ("inspect", "stub", "baseline"),
    "compare": ("diff", "explain", "reproduce", "rebuild", "compare-jit"),
    "run": ("run", "bench"),
    "release": ("sign", "add-jaxlib", "verify", "strip", "extract"),
}
"""The commands of the core, as people look for them."""
ACTIONS: Mapping[str, Sequence[str]] = {
    "plan": ("plan", "imports"),
    "trace": ("export", "locations", "jaxpr", "golden", "reference"),
    "compile": ("compile", "components", "examine", "lower", "optimize"),
    "bundle": ("describe-weights", "bundle", "provenance", "call", "cross"),
    "JAX's compilation cache": ("jax-key", "jax-compile", "jax-cache"),
}
"""Those that only Bazel runs, and what does an action as Bazel does: `stagec action` lists them."""
_ACTION = "action "
_CORE = [*itertools.chain(*GROUPS.values()), *(f"{_ACTION}{name}" for name in itertools.chain(*ACTIONS.values()))]
COMMANDS = tuple(sorted([*_CORE, *extensions.commands()]))
"""All commands, also those of extensions that are not installed."""


class _Parser(argparse.ArgumentParser):
    """A parser with errors that suggest the intended option. words: of the command line."""

    words: Sequence[str] = ()

    def _read_args_from_files(self, arg_strings: list[str]) -> list[str]:
        """Leave words behind -- as they are: they are another program's."""
        own = arg_strings.index("--") if "--" in arg_strings else len(arg_strings)
        return [*super()._read_args_from_files(arg_strings[:own]), *arg_strings[own:]]

    def error(self, message: str) -> NoReturn:
        options = [name for name in self._option_string_actions if name.startswith("--")]
        for word in itertools.takewhile("--".__ne__, self.words):
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in options):
                message = _no(f"option {name}", name, options, self.prog)
                break
        super().error(message)


def _no(what: str, name: str, names: Iterable[str], program: str) -> str:
    """Return the sentence for a name that is not in `names`."""
    near = nearest(name, names)
    return f"no {what}: {near if near.startswith('did you mean') else f'{program} --help lists what there is'}"


def _summaries(actions: bool) -> str:
    """Return the commands with a sentence about each, by groups, for the help. actions: those that only Bazel runs."""
    lines = []
    for title, names in (ACTIONS if actions else GROUPS).items():
        lines += ["", f"{title}:"]
        for name in names:
            lines += _row(name, _module(f"{_ACTION}{name}" if actions else name).__doc__ or "")
    for extension in extensions.EXTENSIONS:
        if rows := [row for row in extension.commands.items() if row[0].startswith(_ACTION) == actions]:
            lines += ["", f"{extension.about}{'' if extension.is_installed else f' ({extension.install})'}:"]
            for name, about in rows:
                lines += _row(name, about)
    return "\n".join(lines)


def _row(name: str, about: str) -> list[str]:
    text = textwrap.wrap(about, 96)
    return [f"  {name.removeprefix(_ACTION):<18}{text[0]}", *(f"{'':20}{line}" for line in text[1:])]


def _module(command: str) -> ModuleType:
    name = command.removeprefix(_ACTION).replace("-", "_")
    if extension := extensions.of_command(command):
        return extensions.imported(f"{extension.package}.commands.{name}", f"stagec {command}")
    return importlib.import_module(f"stagec.cli{'.actions' * command.startswith(_ACTION)}.{name}")


def _is_installed(command: str) -> bool:
    extension = extensions.of_command(command)
    return extension is None or extension.is_installed


_EVERY = {"[--json]": "print the result as JSON on stdout"}
"""Options of every command."""
_WORKERS = {
    "[--profile PROFILE]": "write the seconds of each phase to this file, as JSON",
    "[--declared DECLARED]...": "a file that Bazel expects",
    "[--series SERIES]": "a worker may let one process do the actions with this word, one after the other",
}
"""Options of a command that Bazel keeps a worker for."""


def _declare(parser: argparse._ActionsContainer, usage: str, what: Any) -> None:
    """Declare an option, as a usage line shows it.

    What is in brackets may be left out, and repeated where dots follow: `[--key FILE]...` is a list, of lists where
    there are several values. Of those with | between them only one is given.
    what: a sentence for help, or keywords of argparse's (`options.value`); one for each of several with | between them.
    """
    if " | " in usage:
        group = parser.add_mutually_exclusive_group(required=usage.startswith("("))
        for option, described in zip(usage[1:-1].split(" | "), what, strict=True):
            _declare(group, f"[{option}]", described)
        return
    optional, repeated = usage.startswith("["), usage.endswith("]...")
    names, *values = usage[1 : -4 if repeated else -1].split() if optional else usage.split()
    keywords: dict[str, Any] = dict(what if isinstance(what, Mapping) else {"help": what})
    positional = not names.startswith("-")
    if values and values[-1].startswith("..."):
        any_number = optional if positional else values[0].startswith("[")
        keywords["nargs"] = "*" if any_number else "+"
        del values[-1]
    elif len(values) > 1:
        keywords["nargs"] = len(values)
    elif positional and optional:
        keywords["nargs"] = "?"
    if positional:
        parser.add_argument(names, **keywords)
        return
    if values:
        shown = tuple(word.removeprefix("[") for word in values)
        keywords["metavar"] = shown if len(shown) > 1 else shown[0]
        if shown[0].startswith("{"):
            keywords["choices"] = shown[0].strip("{}").split(",")
    else:
        keywords["action"] = "store_true"
    if repeated:
        more = "" if "may be repeated" in keywords["help"] else "; may be repeated"
        keywords |= {"action": "append", "default": [], "help": f"{keywords['help']}{more}"}
    parser.add_argument(*names.split("/"), required=not optional, **keywords)


_UNWRITABLE = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EPIPE
_INTERRUPTED, _NOBODY_READS = 130, 141
# New objects between two looks for garbage. With Python's 700, and its looks at the end, a command that imports JAX
# spends a sixth of its CPU time on looking at what it has imported.
_GARBAGE = 50_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (None: the process's) and return the exit status."""
    if arguments is None:
        gc.set_threshold(_GARBAGE)
        atexit.register(gc.freeze)
    try:
        try:
            return _main(arguments)
        finally:
            if sys.stdout:
                sys.stdout.flush()  # a disk that is full shows here
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        status = _unwritable(error)
        if status is None:
            raise
        return status


def _unwritable(error: OSError) -> int | None:
    """Print the path that cannot be written, and return the exit status; None for any other error.

    An error without the name of a file comes from stdout or a temporary file.
    """
    if error.errno not in _UNWRITABLE or not sys.stdout:
        return None
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again at its end
    if error.errno == errno.EPIPE:
        return _NOBODY_READS if error.filename is None else None
    where = error.filename or f"stdout, or a temporary file in {tempfile.gettempdir()}"
    print(printable(f"{where}: cannot be written: {error.strerror}"), file=sys.stderr)
    return 2


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:  # as with git and pip: `stagec help`, `stagec help build`
        given = [*given[1:], "--help"]
    of_actions = f"{' '.join(given[:1])} ".startswith(_ACTION)
    if given[:1] == ["action"] and given[1:] and not given[1].startswith("-"):
        given[:2] = [" ".join(given[:2])]
    if given[1:2] == ["--worker_template"]:
        from stagec.worker import template

        return template.serve(int(given[2]), _module(given[0]).preload, lambda words: main([given[0], *words]))
    if given[:1] == ["--forks"]:
        from stagec.cli import forks

        return forks.serve(given[1:], main)
    # If the command is the first word, as in a build's actions, this does not import the modules of the others.
    named = [name for name in COMMANDS if name in given[:1]]
    program = "stagec action" if of_actions else "stagec"
    parser = _Parser(
        prog=program,
        usage="%(prog)s COMMAND ...",
        description="Builds JAX functions ahead of time." + ("" if named else f"\n{_summaries(of_actions)}"),
        epilog=f"{program} COMMAND --help has more. An argument @FILE stands for the arguments in FILE, one a line.",
        fromfile_prefix_chars="@",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stagec {VERSION}")
    if not given or given[0] == "action":
        parser.print_help()
        return 0
    if not named and not given[0].startswith(("-", "@")):
        names = [name.removeprefix(_ACTION) for name in COMMANDS if name.startswith(_ACTION) == of_actions]
        name = given[0].removeprefix(_ACTION)
        parser.error(_no(f'command "{name}"', name, names, program))
    if named and (extension := extensions.of_command(given[0])) and not extension.is_installed:
        print(extension.missing(f"stagec {given[0]}"), file=sys.stderr)
        return 2
    commands = parser.add_subparsers(required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    parsers = {}
    for name in named or filter(_is_installed, COMMANDS):
        module = _module(name)
        subparser = parsers[name] = commands.add_parser(name, prog=f"stagec {name}", description=module.__doc__)
        subparser.words = given
        for usage, what in (_EVERY | module.OPTIONS | (_WORKERS if hasattr(module, "preload") else {})).items():
            _declare(subparser, usage, what)
        subparser.set_defaults(run=module.run)
    if named and (prefix := getattr(_module(given[0]), "ENVIRONMENT", "")):
        given[1:1] = _from_environment(prefix, parsers[given[0]])
    options, unknown = parser.parse_known_args(given)
    if named and len(unknown) == 1 and not unknown[0].startswith("-"):
        # argparse gives up on an operand that may be left out where it meets an option: FIRST --option x SECOND.
        operands = [usage[1:-1] for usage in _module(given[0]).OPTIONS if re.fullmatch(r"\[\w+\]", usage)]
        for operand in [name for name in operands if getattr(options, name) is None][:1]:
            setattr(options, operand, unknown.pop())
    if unknown:
        parsers.get(given[0], parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return (_profiled if getattr(options, "profile", None) else _run)(options, given[0])
    except (StagecError, Refusal) as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        sentence = missing_package(error, f"stagec {given[0]}")
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        return 2


def _from_environment(prefix: str, parser: _Parser) -> list[str]:
    """Return the words for options that the environment has: `PREFIX_KEEP_ALIVE=5` is `--keep-alive=5`.

    1 gives an option without a value, and 0 does not. An option that may be repeated has a value on each line.
    """
    words: list[str] = []
    known = parser._option_string_actions
    for name in sorted(name for name in os.environ if name.startswith(prefix)):
        text, option = os.environ[name], f"--{name.removeprefix(prefix).lower().replace('_', '-')}"
        action = known.get(option)
        if action is None:
            options = [
                f"{prefix}{each.strip('-').upper().replace('-', '_')}" for each in known if each.startswith("--")
            ]
            parser.error(_no(f"option of the environment variable {name}", name, options, parser.prog))
        if action.nargs == 0 and text not in ("0", "1"):
            parser.error(f"the environment variable {name} is {text!r}: write 1 or 0")
        values = [] if action.nargs == 0 else text.splitlines() if isinstance(action.default, list) else [text]
        words += [option] * (action.nargs == 0 and text == "1") + [f"{option}={value}" for value in values]
    return words


def _run(options: argparse.Namespace, command: str) -> int:
    answer: Answer | None = options.run(options)
    return answer.tell(options.json) if answer else 0


def _profiled(options: argparse.Namespace, command: str) -> int:
    from stagec.cli.files import write_whole
    from stagec.core.messages import phases

    phases.start()
    status = _run(options, command)
    if not status:
        artifact = Path(options.profile).name.removesuffix(".profile.json")
        write_whole(options.profile, phases.report(command.removeprefix(_ACTION), artifact).encode())
    return status
