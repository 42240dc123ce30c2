"""Errors that explain to users the faults of their input.

A phase (loading a manifest, planning, exporting, ...) collects every problem it finds and raises them together in one
`StagecError`. The command line prints it to stderr, without a traceback, and exits with status 2.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from stagec.core.messages.refusal import Refusal


@dataclass(frozen=True)
class Problem:
    """One mistake: where it is, the fault, and the correction.

    file: the file as the user knows it (a path relative to the workspace); "" when no file is at fault.
    key: where in the file: a TOML key path such as `functions.predict.args[1].w`; "" stands for the whole file.
    what: what is wrong: one sentence, without a full stop.
    write: what to write or do instead; may have several lines; "" if `what` already says it.
    about: the artifact, if the key stands for several; "" if there is only one.
    label: Bazel's label of the target of the build action; "" outside such an action.
    """

    file: str
    key: str
    what: str
    write: str = ""
    about: str = ""
    label: str = ""

    def __str__(self) -> str:
        """`FILE: KEY: ABOUT: WHAT`, then `write` indented on the following lines. Empty parts are left out.

        With a label, `LABEL: WHAT (FILE: KEY)`.
        """
        where = ": ".join(part for part in (self.file, self.key) if part)
        if self.label:
            lines = [f"{self.label}: {self.what}{f' ({where})' if where else ''}"]
        else:
            lines = [": ".join(part for part in (where, self.about, self.what) if part)]
        lines += [f"  {line}" if line else "" for line in self.write.splitlines()]
        return "\n".join(lines)


class StagecError(Exception):
    """A mistake in a manifest or a model, or several. The message lists all of them.

    problems: each with file, key, what is wrong, and what to write instead; never empty.
    """

    problems: tuple[Problem, ...]

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise ValueError("StagecError needs at least one Problem")
        super().__init__(*problems)
        self.problems = problems

    def of(self, label: str) -> StagecError:
        """Return the same error of a Bazel target; "" is none."""
        return StagecError(*(replace(problem, label=label) for problem in self.problems))

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def mistake(what: str, write: str = "") -> StagecError:
    """Return the error of one mistake that is in no file, such as a wrong word of a command line."""
    return StagecError(Problem("", "", what, write))


@contextlib.contextmanager
def blaming(
    file: str, write: str = "", what: str = "", of: tuple[type[Exception], ...] = (ValueError, Refusal)
) -> Iterator[None]:
    """Raise StagecError, naming a file, for an error in a block that reads it.

    For an OSError, the message is that the file cannot be read. For an error of the classes `of`, it is `what` and the
    error's own string.
    write: the advice if the file is not the right one.
    """
    try:
        yield
    except OSError as error:
        raise StagecError(Problem(str(error.filename or file), "", f"cannot be read: {error.strerror}")) from error
    except of as error:
        raise StagecError(Problem(file, "", what + str(error).removeprefix(f"{file}: "), write)) from error


_EXTRA = {
    **{name: name for name in ("cryptography", "flatbuffers", "httptools", "jax", "orjson", "pydantic", "uvicorn")},
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "prometheus_client": "prometheus-client",
}
"""The packages that only a part of stagec needs: the name to import, and the name to install."""


def missing_package(error: ImportError, user: str) -> str | None:
    """Return the sentence for a package that stagec's wheel or an extra of it brings; None for any other import.

    user: who needs it, such as "stagec init".
    """
    package = _EXTRA.get((error.name or "").partition(".")[0])
    if package is None:
        return None
    return f"{user} needs the package {package}, which is not installed: {install(package)}"


def install(package: str) -> str:
    """Return the command that installs a package that stagec can do without; jax goes with the jaxlib that is there."""
    from importlib import metadata  # it takes longer than the rest, and is for errors

    try:
        return f"pip install {package}" + (f"=={metadata.version('jaxlib')}" if package == "jax" else "")
    except metadata.PackageNotFoundError:
        return f"pip install {package}"


def nearest(name: str, names: Iterable[str]) -> str:
    """A sentence with the likeliest of `names` to be meant, else with all of them; "" if there are none."""
    known = {candidate.lower(): candidate for candidate in sorted(names)}
    closest = difflib.get_close_matches(name.lower(), known, n=1)
    if closest:
        return f'did you mean "{known[closest[0]]}"?'
    return f"write one of {', '.join(known.values())}" if known else ""


def printable(text: str) -> str:
    """A string for a terminal: characters that move its cursor or change its colours become escapes. Newlines stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else rf"\x{ord(character):02x}"
        for character in text
    )


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
"""A key that TOML takes without quotes."""


def show(value: object) -> str:
    """A value as TOML writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            shown = "".join(
                character if character.isprintable() else rf"\u{ord(character):04x}" for character in escaped
            )
            return f'"{shown}"'
        case dict():
            keys = [key if _BARE_KEY.fullmatch(key) else show(key) for key in value]
            pairs = [f"{key} = {show(item)}" for key, item in zip(keys, value.values(), strict=True)]
            return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
        case list() | tuple():
            return "[" + ", ".join(show(item) for item in value) + "]"
    return str(value)


def near(name: str, known: Collection[str]) -> str:
    """Return a question with the names that begin with `name`, else with similar names; "" if there are none."""
    names = [spelled for spelled in known if name and spelled.lower().startswith(name.lower())]
    names = names or difflib.get_close_matches(name.lower(), known, 3)
    return f"did you mean {either([show(spelled) for spelled in names])}?" if names else ""


def either(choices: Sequence[str]) -> str:
    """Return choices as words: "a, b or c"."""
    return f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else choices[0]
