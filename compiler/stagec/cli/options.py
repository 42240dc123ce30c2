"""Options that several commands have."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from stagec.cli.files import Options, read, read_text, write_whole
from stagec.core.messages.errors import StagecError, blaming, mistake

if TYPE_CHECKING:
    from stagec.core.builds.specs import ExecutableSpec, FunctionSpec


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads an option's whole number, which is `least` or more."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if int(text) >= least:
                return int(text)
        raise argparse.ArgumentTypeError(f"write a whole number, {least} or more, not {text!r}")

    return read


def more_than_0(text: str) -> float:
    """Read an option's number, which is more than 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"write a number of more than 0, not {text!r}")


def value(
    what: str, default: object = None, read: Callable[[str], object] | None = None, **more: object
) -> dict[str, object]:
    """Return what is said of an option with a default, or whose value is not a string.

    what: a sentence for help. read: makes the value of a string. more: as argparse has it.
    """
    given = {"default": default, "type": read, **more}
    return {"help": what, **{key: item for key, item in given.items() if item is not None}}


def only_with(what: str, given: object, options: Options, *names: str) -> None:
    """Raise StagecError if one of some options was given, and not what it is about: it would change nothing.

    what: what they are about; given: whether that is there. names: of the options' values.
    """
    for name in names if not given else ():
        if getattr(options, name) or type(getattr(options, name)) is int:
            raise mistake(f"--{name.replace('_', '-')} is for {what}: leave it out")


IMPORT_ROOTS = {"[--import-root FOLDER]...": "folder below which modules and files are found, the first wins"}
"""Of a command that Bazel gives all of them."""
MANIFEST_IMPORT_ROOTS = {
    "[--import-root FOLDER]...": "of a manifest: folder below which modules and files are found; may be repeated "
    "(default: this folder)"
}
"""Of a command that people give a manifest."""
FUNCTION = {
    "--spec SPEC": "the function's spec, a JSON file",
    **IMPORT_ROOTS,
    "[--source FILE]...": "a file that the model may read",
    "[--names FILE]": "a file with the names of more of these, one a line",
    "[--imports FILE]": "what `stagec action imports` wrote of the function",
    "[--unread FILE]": "where to write which of these it did not read, one a line",
    "[--as-another-machine]": "let this process see another CPU, if this machine can show one",
}
"""Of a command that runs a model's code (`tracing`), and must make the same on every machine."""
EXECUTABLE = {
    "--spec SPEC": "the executable's spec, a JSON file",
    "[--label LABEL]": value("what messages call it: the label of a Bazel target", ""),
}
"""Of a command that compiles an executable (`compiling`)."""
PROGRAM = {
    **EXECUTABLE,
    "--exported EXPORTED": "the exported artifact to compile",
    "[--lowered LOWERED]": "what JAX lowered for devices, beside it",
}
"""Of one that compiles an exported artifact (`program`)."""
WEIGHTS = {"[--weights FOLDER]": "the folder with the files of weights beside the bundle (default: its own)"}
"""Of a command that reads a bundle with weights beside it."""
INVENTORY = {"[--inventory FILE]...": "the inventory of an executable (default: those beside the bundle)"}
"""Of a command that compares what executables take."""
STATEMENT = {
    "[--statement STATEMENT]": "where to write the bundle's in-toto statement, which stagec sign takes",
    "[--sbom SBOM]": "where to write the CycloneDX SBOM of what it was compiled with",
    "[--packages FILE]...": "with --statement or --sbom: the packages of this environment, as `pip install --report` "
    "or a Bazel environment's packages.json has them",
}
"""Of a command that builds a bundle with the packages of its Python."""
REPORT = (
    "write one, and give it: python3 -m pip install --dry-run --ignore-installed --report packages.json -r YOUR.lock"
)
"""What to write where `STATEMENT` has no list of packages, or one of others."""
PLUGINS = {"[--plugin PLATFORM=FOLDER]...": "packages that only compiling for the platform may import"}
"""Of a command that compiles."""


_SPEC = "give one of the specs in the plan of the manifest; stagec build does all of this"


@contextlib.contextmanager
def compiling(options: Options) -> Iterator[ExecutableSpec]:
    """Yield the spec of `EXECUTABLE`, in a process that is ready to compile for its target.

    The block imports what imports jaxlib, and not before. Its errors get the label.
    """
    from stagec.backends.compilation import backend
    from stagec.core.builds.specs import executable_spec

    with blaming(options.spec, _SPEC, "not the spec of an executable: "):
        spec = executable_spec(read_text(options.spec))
    backend(spec.target.platform).prepare_process(spec.target)
    try:
        yield spec
    except StagecError as error:
        raise error.of(options.label) from error


def program(options: Options, spec: ExecutableSpec) -> tuple[bytes, ExecutableSpec, bytes]:
    """Return what the functions of `building.compilation` take: the files of `PROGRAM`, and the spec between them."""
    return read(options.exported), spec, read(options.lowered) if options.lowered else b""


@contextlib.contextmanager
def tracing(options: Options) -> Iterator[FunctionSpec]:
    """Yield the spec of `FUNCTION`, in a process in which its model computes the same on every machine.

    The block imports what imports jaxlib, NumPy or JAX, and not before. When it has been left without an error,
    `--unread` is written.
    """
    from stagec.backends.cpu import eager
    from stagec.core.builds import imports
    from stagec.core.builds.specs import function_spec

    if options.as_another_machine:
        eager.be_another_machine()
    eager.prepare_process()
    if options.unread:
        from stagec.frontends.common.reads import Reads

        eager.find_code()  # it calls native code, which a model does not
        reads = Reads()
    with blaming(options.spec, _SPEC, "not the spec of a function: "):
        spec = function_spec(read_text(options.spec))
    with eager.computing(spec):
        yield spec
    if not options.unread:
        return
    lines = reads.unread([*options.source, *(read_text(options.names).splitlines() if options.names else ())])
    if options.names:
        looked = imports.from_json(read_text(options.imports))
        own = [value for value in vars(options).values() if isinstance(value, str)]
        why = reads.names_matter(looked, own)
        lines.append(f"{imports.WHY}{why}" if why else options.names)  # Bazel passes over other lines
    write_whole(options.unread, "".join(f"{line}\n" for line in lines).encode())
