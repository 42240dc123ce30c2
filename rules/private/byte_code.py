"""Compiles the modules of an installed environment, and keeps the byte code of each wheel for the next one.

Python may not write beside the packages when an action imports them, so it would compile them for every action: of JAX
that takes seconds. The .pyc files are never checked against a clock: one that is compared with its source's would be
stale or not by how files were copied. Their bytes depend on the wheel, on the path in the environment and on the
interpreter alone. Packages' own tests are not compiled: nothing that a build runs imports them.

stagec's own modules are not packages: actions have their sources as inputs, and these can be edited. Their byte code
lies beside the packages, has the hash of its source, and Python compares that (stagec/worker/installed.py).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import marshal
import os
import py_compile
import shutil
import sys
import tempfile
import types
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path, PurePosixPath

_CACHE = f"stagec-byte-code-2/{sys.implementation.cache_tag}-{sys.hexversion:x}"
_AT_ONCE = 20  # modules for a process at once
STAGEC = "byte-code"
"""The folder of the byte code of stagec's modules: a file `MODULE.pyc` for each, such as `stagec.core.pyc`."""

# A hash of the source, which is never checked: https://peps.python.org/pep-0552
_HEADER = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little")


def compile_all(folder: Path, wheels: Mapping[str, str], cache: Path | None) -> None:
    """Write the .pyc files of all modules below a folder, given relative to the working directory.

    wheels: the sha256 of the wheel of each distribution, by the name in its METADATA. cache: where byte code is kept;
    None: nowhere. Modules that do not compile are passed over: packages ship some that are not meant to.
    """
    known = _modules(folder)
    kept = {name: cache / _CACHE / f"{sha256}.zip" for name, sha256 in wheels.items()} if cache else {}
    new = [name for name in known if not (name in kept and _restore(folder, kept[name], known[name]))]
    _on_all_cores(_compile, [str(folder / module) for name in new for module in known[name]])
    for name in new:
        if name in kept:
            _keep(folder, kept[name], known[name])


def compile_stagec(package: Path) -> None:
    """Write the byte code of stagec's modules into the folder STAGEC, below the working directory.

    package: stagec's folder with their sources. A module that does not compile gets no byte code: the action that
    imports it says what is wrong.
    """
    Path(STAGEC).mkdir()
    _on_all_cores(functools.partial(_compile_of_stagec, package), [str(file) for file in package.rglob("*.py")])


def _on_all_cores(compile_one: Callable[[str], object], files: Sequence[str]) -> None:
    workers = min(len(os.sched_getaffinity(0)), len(files) // _AT_ONCE)
    if workers > 1:
        with ProcessPoolExecutor(workers) as pool:
            for _ in pool.map(compile_one, files, chunksize=_AT_ONCE):
                pass
    else:
        for file in files:
            compile_one(file)


def _compile_of_stagec(package: Path, file: str) -> None:
    parts = Path(file).relative_to(package.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    with contextlib.suppress(OSError):
        py_compile.compile(file, f"{STAGEC}/{name}.pyc", invalidation_mode=checked, quiet=2)


def _modules(folder: Path) -> dict[str, list[str]]:
    """The modules of each distribution below the folder, as RECORD has them, without those of tests."""
    modules_of = {}
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        paths = [PurePosixPath(path) for path, *_ in csv.reader((distribution.read_text("RECORD") or "").splitlines())]
        below = [path for path in paths if not path.is_absolute() and ".." not in path.parts]
        modules = [path for path in below if path.suffix == ".py" and "tests" not in path.parts]
        modules_of[distribution.metadata["Name"]] = sorted(map(str, modules))
    return modules_of


def _compiled(module: str) -> str:
    return importlib.util.cache_from_source(module, optimization="")


def _compile(file: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            source = Path(file).read_bytes()
            code = importlib.machinery.SourceFileLoader("<module>", file).source_to_code(source, file)
            compiled = Path(_compiled(file))
            compiled.parent.mkdir(exist_ok=True)
            compiled.write_bytes(_HEADER + importlib.util.source_hash(source) + _marshalled(code))
            shutil.copymode(file, compiled)
        except (OSError, SyntaxError, ValueError):
            pass


def _marshalled(code: types.CodeType) -> bytes:
    """Return a module's code as importlib reads it, the same bytes in every process.

    marshal marks what may be referred to again: all that has more than one reference
    (https://github.com/python/cpython/issues/78274), and strings that are interned. Whether a name has another
    reference, or the one string of a character is interned, depends on what the process imported before. Here all have
    one reference more, and all such strings are interned.
    """
    for character in map(chr, range(256)):
        sys.intern(character)
    held = _objects(code)
    try:
        return marshal.dumps(code)
    finally:
        del held


def _objects(value: object) -> list[object]:
    """Return what a code object is made of, each with one reference more."""
    parts: Iterable[object] = ()
    if isinstance(value, types.CodeType):
        parts = (
            value.co_consts,
            value.co_names,
            value.co_varnames,
            value.co_cellvars,
            value.co_freevars,
            value.co_filename,
            value.co_name,
            value.co_qualname,
            value.co_linetable,
            value.co_exceptiontable,
        )
    elif isinstance(value, tuple | frozenset):
        parts = value
    return [value, *(inner for part in parts for inner in _objects(part))]


def _restore(folder: Path, kept: Path, modules: Sequence[str]) -> bool:
    """Take byte code out of the cache; whether it was there and is whole (zip files have a checksum of each member)."""
    wanted = {_compiled(module) for module in modules}
    try:
        with zipfile.ZipFile(kept) as archive:
            files = {name: archive.read(name) for name in archive.namelist() if name in wanted}
    except (OSError, zipfile.BadZipFile):
        return False
    for module in modules:
        if content := files.get(_compiled(module)):
            compiled = folder / _compiled(module)
            compiled.parent.mkdir(exist_ok=True)
            compiled.write_bytes(content)
            shutil.copymode(folder / module, compiled)
    return True


def _keep(folder: Path, kept: Path, modules: Iterable[str]) -> None:
    """Put byte code into the cache, whole or not at all: several environments are installed at the same time."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file,
            zipfile.ZipFile(file, "w", strict_timestamps=False) as archive,
        ):
            for name in map(_compiled, modules):
                if (folder / name).exists():
                    archive.write(folder / name, name)
        Path(file.name).replace(kept)
    except OSError:
        return  # a full disk or another one's folder: it is only a cache
