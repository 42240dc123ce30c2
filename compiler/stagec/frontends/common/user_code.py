"""Run the user's code: import an entry point, call it, and report a failure from the user's view.

A failure is a `Problem` with the traceback of the user's own code: frames of stagec, of the import system and of
installed packages are left out, and file names are relative to the workspace.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stagec.core.builds import distributions, extensions
from stagec.core.messages import phases
from stagec.core.messages.errors import Problem, StagecError
from stagec.frontends.common import packages

T = TypeVar("T")

_INSTALLED = re.compile(r"""(?:/[^\s"'()/]+)*/site-packages/(?=\S)""")
_workspace: list[str] = []
"""The current folder at the import of user code, because a model may change it later; None before an import."""


def add_import_roots(roots: Sequence[str]) -> None:
    """Make the modules below each of `roots` (folders, first wins) importable.

    The user's own come before all others; installed packages come behind those of stagec's environment.
    """
    _workspace[:] = [str(Path.cwd())]
    folders = [str(Path(root).absolute()) for root in roots]
    behind = [folder for folder in folders if packages.are_in(folder)]
    sys.path[:0] = [folder for folder in folders if folder not in behind]
    sys.path += [folder for folder in behind if folder not in sys.path and Path(folder).is_dir()]


def load_entry(entry: str, file: str, key: str) -> Any:
    """Return the object named by `entry` ("package.module:attribute").

    file, key: the manifest and the key that hold the entry, for messages.
    Raises StagecError when the module or the attribute is missing, or when importing the module raises.
    """
    module_name, _, attribute = entry.partition(":")
    try:
        with phases.phase("import"):
            value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            write = "write the module as it is imported from the workspace root, and name its file in deps"
            if str(Path.cwd()) not in sys.path and _module_in(Path.cwd(), error.name.partition(".")[0]):
                write = f"{error.name.partition('.')[0]} is in this folder: add --import-root ."
            if "." in error.name and error.name.partition(".")[0] in sys.stdlib_module_names:
                write = hidden(module_name)
            raise StagecError(Problem(file, key, f"no module {error.name!r}", write)) from error
        raise _raised(error, f"importing {module_name} raised", file, key) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() in a module is the user's mistake too
        raise _raised(error, f"importing {module_name} raised", file, key) from error
    done = module_name
    for name in attribute.split("."):
        if not hasattr(value, name):
            names = [n for n in dir(value) if not n.startswith("_")]
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names[:8]) or 'no public names'}"
            raise StagecError(Problem(file, key, f"{done} has no attribute {name!r}", hint))
        value, done = getattr(value, name), f"{done}.{name}"
    return value


def run(call: Callable[[], T], what: str, file: str, key: str) -> T:
    """Return `call()`; when it raises, raise a StagecError that says `what` raised, with the user's traceback."""
    try:
        return call()
    except (StagecError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _raised(error, what, file, key) from error


def location(frames: Iterable[tuple[str, int]]) -> str:
    """Return the innermost of `frames` (file name, line) that is the user's own as FILE:LINE; "" when none is."""
    return next((f"{_displayed(name)}:{line}" for name, line in frames if is_users(name)), "")


def library(frames: Iterable[tuple[str, int]]) -> tuple[str, str] | None:
    """Return the top module of the library that the innermost of `frames` is in, and FILE:LINE there.

    It passes over frames of JAX, Python and stagec. None if the next frame is the user's own, or there is none.
    """
    for name, line in frames:
        if is_users(name):
            return None
        inside = _INSTALLED.sub("", name)
        ours = name.startswith(extensions.sources())  # pip installs stagec beside the libraries
        if inside != name and not ours and not inside.startswith(("jax/", "jaxlib/")):
            return Path(inside).parts[0].removesuffix(".py"), f"{inside}:{line}"
    return None


def displayed(text: str) -> str:
    """Return a string with its paths as every machine has them: of the workspace, and of installed packages."""
    (workspace,) = _workspace or [str(Path.cwd())]
    return _INSTALLED.sub("", text).replace(workspace.rstrip(os.sep) + os.sep, "")


def _raised(error: BaseException, what: str, file: str, key: str) -> StagecError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    for frame in frames:
        frame.filename = _displayed(frame.filename)
    # JAX's messages have the locations of functions.
    lines = "".join(traceback.format_list(frames)) + displayed("".join(traceback.format_exception_only(error)))
    advice = _advice(error, file)
    return StagecError(Problem(file, key, f"{what} {type(error).__name__}", "\n".join([lines.rstrip(), *advice])))


def _advice(error: BaseException, manifest: str) -> list[str]:
    """Return the advice if a model lacks a module or a file; nothing for any other error.

    An action sees the files that BUILD names, and no others of the workspace.
    """
    while not isinstance(error, ImportError | FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    names = [name for name in names if not name.startswith("<")]
    importer = next((Path(name) for name in reversed(names) if is_users(name)), None)
    if isinstance(error, FileNotFoundError):
        program = bool(names) and Path(names[-1]).name == "subprocess.py"  # it looked for a program
        return [] if program or not importer else [_missing_file(error.filename, importer, manifest)]
    if isinstance(error, ModuleNotFoundError) and error.name:
        # Imports of an installed package are not files of the workspace.
        return _missing_module(error.name, importer if names and is_users(names[-1]) else None, manifest)
    part = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    if isinstance(error, ImportError) and part and any(map(is_users, _folders(part[2]))):
        return _missing_module(f"{part[2]}.{part[1]}", importer, manifest)
    return []


def _missing_module(name: str, importer: Path | None, manifest: str) -> list[str]:
    """Return the advice for a missing module. importer: the user's file that imports it; None: a library."""
    top, _, inside = name.partition(".")
    parents = _folders(name.rpartition(".")[0]) if inside else []
    package = distributions.of_import(name)
    again = f"into requirements.in, and run {distributions.LOCK_COMMAND} requirements.in"
    if parents and not any(map(is_users, parents)):
        return [f"the {package or top} of the lock has no {name}: write another version into requirements.in"]
    if parents:
        return [_name_in("deps", Path(f"{name.replace('.', '/')}.py"), manifest)]
    if inside and top in sys.stdlib_module_names:
        return [hidden(name)]
    if package and (importer is None or name in distributions.NAMES or top in distributions.NAMES):
        return [f'it is of the package {package}: write "{package}" {again}']
    if importer is None:
        return [f"write the package that brings it {again}"]
    if there := _module_in(importer.parent, top):
        path = Path(_displayed(str(importer))).with_name(there)
        dotted = ".".join([*path.parent.parts, top])
        return [f'{path} is there: import it as {dotted}, or write imports = ["."] in aot_manifest']
    # Files of a sandbox are links to those of the workspace.
    inside_workspace, real = Path(_displayed(str(importer))), importer.resolve()
    for folder in dict.fromkeys((inside_workspace.parent, Path())):
        if there := _module_in(real.parents[len(inside_workspace.parts) - 1] / folder, top):
            file = folder / (there if there.endswith(".py") else f"{there}/NAME.py")
            return [_name_in("deps", file, manifest)]
    what = f'write "{package}"' if package else "find out which package brings it, and write that"
    return [
        f"if {package or top} is a package of others: {what} {again}",
        f'if it is a file of the workspace: name it in deps of aot_manifest in BUILD, such as "//FOLDER:{top}.py"',
    ]


def hidden(module: str) -> str:
    """Return the advice for a module below a folder that has the name of a module of Python's library."""
    top, _, below = module.partition(".")
    return (
        f"Python's own module {top} hides the folder {top}: rename the folder; or write {below}, and in aot_manifest "
        f'the way from BUILD to the folder, such as imports = ["../{top}"]'
    )


def _missing_file(filename: object, importer: Path, manifest: str) -> str:
    """Return the advice for a missing file. filename: from the call that opened it; None: it is not known."""
    if not isinstance(filename, str):
        return "a file that a model reads: name it in data of aot_manifest in BUILD, or with --data"
    path = Path(_displayed(filename))
    if not Path(filename).is_absolute() and (importer.parent / filename).exists():
        there = _displayed(str(importer.parent / filename))
        return f'{there} is there, and paths are relative to the workspace: open "{there}"'
    if path.is_absolute():
        return (
            "an action reads files of the workspace alone: copy it there, and name it in data of aot_manifest in BUILD"
            ", or with --data"
        )
    return _name_in("data", path, manifest)


def _name_in(attribute: str, file: Path, manifest: str) -> str:
    """Return the sentence that has the user name a file of the workspace in BUILD."""
    package = Path(manifest).parent
    inside = file.is_relative_to(package)
    label = file.relative_to(package) if inside else f"//{str(file.parent).removeprefix('.')}:{file.name}"
    what = {"deps": "a module of the workspace", "data": "data of the model"}[attribute]
    also = f", or give stagec build --data {file}" if attribute == "data" else ""
    return f'{file} is {what}: write ["{label}"] in {attribute} of aot_manifest in BUILD{also}'


def _folders(module: str) -> list[str]:
    """Return the folders with an imported package's modules; none if it was not imported."""
    return list(getattr(sys.modules.get(module), "__path__", []))


def _module_in(folder: Path, name: str) -> str:
    """Return the name of a top-level module's file or folder in a folder; "" if it has none."""
    return next((entry for entry in (f"{name}.py", name) if (folder / entry).exists()), "")


def is_users(filename: str) -> bool:
    """Whether a file is the user's own: not stagec's, not Python's, and in no installed package."""
    installed = [
        sys.base_prefix,
        *(str(Path(entry).absolute()) for entry in sys.path if entry.endswith("site-packages")),
    ]
    return not filename.startswith(("<", *extensions.sources(), *(folder + os.sep for folder in installed)))


def _displayed(filename: str) -> str:
    relative = os.path.relpath(filename, *_workspace)
    return filename if relative.startswith("..") else relative


def positional(function: Callable[..., Any], static: Collection[str] = ()) -> list[str]:
    """Return the names of the parameters that take positional arguments, and `*name` of one that takes all others.

    static: names of those that are not arguments of a call. Empty for a builtin, which has no signature.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: "",
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "",
        inspect.Parameter.VAR_POSITIONAL: "*",
    }
    return [
        f"{kinds[parameter.kind]}{parameter.name}"
        for parameter in parameters
        if parameter.kind in kinds and parameter.name not in static
    ]
