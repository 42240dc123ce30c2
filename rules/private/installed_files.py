"""Makes the files of an installed environment the same wherever it was installed, and says which they are.

pip and uv leave in it who installed it, with which path of Python and under which umask. What differs goes: scripts
that start an interpreter by its path (nothing starts them: programs are `python -m`), INSTALLER and its like. RECORD
has the files that are left, in one order: importlib.metadata reads it
(https://packaging.python.org/en/latest/specifications/recording-installed-packages).

An environment that actions get is trimmed too: Bazel handles each of its files, for each action of a remote engine.
"""

from __future__ import annotations

import csv
import dis
import hashlib
import io
import os
import re
import shutil
import stat
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType

# What installers write of themselves.
OF_INSTALLERS = ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
_TESTS = "tests"
_HEADERS = (".cuh", ".h", ".hh", ".hpp", ".pxd")
_STUBS = ".pyi"
# What an import or a string of a source has, and most sentences have not.
_MENTIONS_TESTS = re.compile(
    rb"""["'./\\]tests\b|\btests["'/\\]|\bfrom\s+tests\b|\bimport\b.*\btests\b|^\s*tests\s*(?:,|\)|as\b|\#|$)""",
    re.MULTILINE,
)


def normalize(folder: Path, trimmed: bool) -> None:
    """Make an installed environment the same for all who install it. Only byte code may be missing yet.

    trimmed: whether to leave out what nothing imports: packages' own tests, headers and stubs.
    """
    for file in _files(folder):
        written_by_installer = file.parent.name.endswith(".dist-info") and file.name in OF_INSTALLERS
        if written_by_installer or _starts_an_interpreter(folder, file):
            file.unlink()
    if trimmed:
        _trim(folder)
    for record in sorted(folder.glob("*.dist-info/RECORD")):
        record.write_text(_record(folder, record), encoding="utf-8")
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        else:
            # pip leaves programs as they are in the wheel.
            executable = path.is_dir() or path.parent == folder / "bin" or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if executable else 0o644)


def digest(folder: Path) -> str:
    """The SHA-256 of all files: their paths, whether they are executable, and bytes.

    Not of byte code: it says what its source says, and differs between releases of one Python.
    """
    files = [file for file in _files(folder) if file.suffix != ".pyc"]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        rows = zip(files, pool.map(_sha256, files), strict=True)
        text = "".join(
            f"{sha256} {file.stat().st_mode & 0o111:o} {file.relative_to(folder)}\n" for file, sha256 in rows
        )
    return hashlib.sha256(text.encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(Path(root, name) for root, _, names in os.walk(folder) for name in names)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _starts_an_interpreter(folder: Path, file: Path) -> bool:
    """Whether a file is a script in bin/. Programs stay, such as uv."""
    if file.parent != folder / "bin":
        return False
    with file.open("rb") as opened:
        return opened.read(2) == b"#!"


def _record(folder: Path, record: Path) -> str:
    """A RECORD of the files that are there. Scripts and data are beside the packages, wherever it says they are."""
    rows: dict[str, list[str]] = {}
    for path, *more in csv.reader(record.read_text(encoding="utf-8").splitlines()):
        inside = re.sub(r"^(\.\./)+", "", path)
        if (folder / inside).is_file():
            rows[inside] = more
    rows[record.relative_to(folder).as_posix()] = ["", ""]  # some wheels leave it out
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([path, *more] for path, more in sorted(rows.items()))
    return written.getvalue()


def _trim(folder: Path) -> None:
    kept = _imported_tests(folder)
    for tests in [path for path in sorted(folder.rglob(_TESTS)) if path.is_dir()]:
        if not any(tests == kept_tests or kept_tests in tests.parents for kept_tests in kept):
            shutil.rmtree(tests, ignore_errors=True)
    for file in _files(folder):
        unread = file.suffix == _STUBS and not _reads_its_stub(file.with_suffix(".py"))
        if file.suffix in _HEADERS or unread:
            file.unlink()


def _reads_its_stub(module: Path) -> bool:
    """Whether a module finds out from its stub what it imports (https://scientific-python.org/specs/spec-0001)."""
    return module.exists() and b"attach_stub" in module.read_bytes()


def _imported_tests(folder: Path) -> set[Path]:
    """The folders of tests that a module names which is in none, or in one of these."""
    kept: set[Path] = set()
    unread = []
    waiting: dict[Path, list[Path]] = {}
    for file in folder.rglob("*.py"):
        at = file.relative_to(folder).parts
        if _TESTS in at[:-1]:
            waiting.setdefault(folder.joinpath(*at[: at.index(_TESTS) + 1]), []).append(file)
        else:
            unread.append(file)
    while unread:
        for tests in _named_tests(folder, unread.pop()):
            if tests not in kept:
                kept.add(tests)
                unread += waiting.pop(tests, [])
    return kept


def _named_tests(folder: Path, module: Path) -> Iterator[Path]:
    """The folders of tests that a module imports, or may open or import by a name: those that a string of it names."""
    source = module.read_bytes()
    if _TESTS.encode() not in source or not _MENTIONS_TESTS.search(source):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codes = [compile(source, module, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return  # Python does not import it either
    parents = [folder, *(path for path in module.parents if folder in path.parents)]
    for code in codes:
        constants = [
            constant for const in code.co_consts for constant in (const if isinstance(const, tuple) else (const,))
        ]
        codes += [constant for constant in constants if isinstance(constant, CodeType)]
        names = {constant for constant in constants if isinstance(constant, str) and not re.search(r"\s", constant)}
        if any(_TESTS in name for name in code.co_names):
            names |= {
                instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "IMPORT_NAME"
            }
        for name in names:
            yield from _outermost(folder, parents, name)


def _outermost(folder: Path, parents: Iterable[Path], name: str) -> Iterator[Path]:
    """The folder of tests that a dotted name or a path leads into from one of some folders."""
    words = [word for word in re.split(r"[./\\]+", name) if word]
    if _TESTS not in words:
        return
    for parent in parents:
        tests = parent.joinpath(*words[: words.index(_TESTS) + 1])
        if tests.is_dir():
            at = tests.relative_to(folder).parts
            yield folder.joinpath(*at[: at.index(_TESTS) + 1])
