"""Which of its declared files a process read, so that Bazel can pass over edits of the others.

Python tells audit hooks what it opens (https://docs.python.org/3/library/audit_events.html). It does not report
`os.stat`, which returns a file's size, so this module watches it. Nor does it report files that native code and other
processes open: safetensors opens files in Rust. Where native code of others was loaded, only Python sources can be
unread; where a process was started, no file can.

The set of files matters too: an import or a listing may find a new file. If a process looked only for names that
`core/builds/imports.py` knew before, the names of all files are unread as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from stagec.core.builds.imports import Looked
from stagec.frontends.common import patched

_STARTS = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen"}
)
"""Events of a new process."""
_STARTS_SILENTLY = frozenset({"multiprocessing.popen_forkserver", "multiprocessing.popen_spawn_posix"})
"""Modules that are imported to start one without an event."""
_READ_NO_FILES = frozenset({"fc-list", "ldconfig", "lscpu", "uname"})
"""Programs that describe the machine, and read no user files: matplotlib asks for fonts."""
_OF_THE_MACHINE = re.compile("^(/usr)?/s?bin/(?=[^/]*$)")
_CALLS_NATIVE_CODE = frozenset({"ctypes.dlopen", "ctypes.dlsym", "ctypes.dlsym/handle"})
_HEARD = frozenset({"open", "import", "os.listdir", "os.scandir"}) | _STARTS | _CALLS_NATIVE_CODE
_OPENS_NO_FILES = frozenset(
    {"PIL", "charset_normalizer", "contourpy", "jax_cuda12_plugin", "jax_cuda13_plugin", "jaxlib", "kiwisolver"}
    | {"matplotlib", "ml_dtypes", "msgpack", "numpy", "scipy", "yaml"}
)
"""Packages whose native code opens no user file by its path, except the modules that follow."""
_OPENS_FILES = ("PIL._imagingft", "_dbm", "_gdbm", "_sqlite3", "scipy.io.")
_IMPORT_SYSTEM = frozenset({"_frozen_importlib_external", "importlib._bootstrap_external"})
_OPENS_BELOW = frozenset({"os", "shutil", "stagec"})
"""Packages that open files below a descriptor: of folders that they have listed, or to write."""
_TAKES_NAMES = frozenset({"glob", "importlib", "os", "pathlib", "shutil"})
"""Python modules that ask `os.scandir` for names alone; its entries have sizes too."""


class Reads:
    """The files that this process reads from here on. Nothing stops it: use one, in a process that ends soon."""

    def __init__(self) -> None:
        self._stat = os.stat
        self._here = os.getcwd()
        self._installed = [os.path.abspath(entry) for entry in sys.path if entry]
        self._searched: set[tuple[str, str]] = set()
        self._listed: set[str] = set()
        self._missed: set[str] = set()
        self._why_all = ""
        self._files: set[tuple[int, int]] = set()
        self._folders: set[tuple[int, int]] = set()
        self._relative: set[str] = set()
        self._native_code = self._processes = False
        for patch in patched.STAT:
            self._replace(patch, self._asking)
        patched.FIND.forever(self._searching)
        self._replace(patched.OPEN, self._opening)
        sys.addaudithook(self._hear)

    def unread(self, paths: Sequence[str]) -> list[str]:
        """Return those of `paths`, declared files, whose content did not matter so far."""
        if self._processes or not sys.modules.keys().isdisjoint(_STARTS_SILENTLY):
            return []
        names = {path.rpartition("/")[2] for path in paths}
        for module in list(sys.modules.values()):  # earlier imports count too
            file = getattr(module, "__dict__", {}).get("__file__")
            if isinstance(file, str) and file.rpartition("/")[2] in names:
                self._note(file, self._files)
        return [path for path in paths if self._is_unread(path)]

    def names_matter(self, looked: Looked, own: Collection[str]) -> str:
        """Say why another file among the declared ones may matter that `looked` does not know of; "" if none can.

        own: files that stagec itself reads and writes.
        """
        if self._processes or not sys.modules.keys().isdisjoint(_STARTS_SILENTLY):
            return self._why_all or "it starts a process"
        if self._native_code:
            return f"{self._why_all} is native code, which may open any file"
        ours = {os.path.abspath(path) for path in own}
        roots = [*looked.roots]
        installed = tuple(f"{entry}/" for entry in self._installed if os.path.relpath(entry, self._here) not in roots)
        users = functools.partial(self._users, roots=roots, installed=installed)
        for what, paths in (("lists the files of", self._listed), ("looks in vain for", self._missed - ours)):
            for path in sorted(filter(None, map(users, paths))):
                if not looked.has_path(path):
                    return f"it {what} {path}"
        for folder, name in sorted(self._searched):
            shown = users(folder)
            if shown is not None and not looked.has(shown, name):
                return f"it imports {name} from {shown}, which no source says"
        return self._why_all

    def _users(self, path: str, roots: Sequence[str], installed: tuple[str, ...]) -> str | None:
        """Return a user's path in the form of declared paths; None for a path of the machine or of packages."""
        if f"{path}/".startswith(installed):
            return None
        relative = os.path.relpath(path, self._here)
        below = not relative.startswith("../") or any(f"{relative}/".startswith(f"{root}/") for root in roots)
        return relative if below else None

    def _searching(self, before: Callable[..., Any], finder: Any, fullname: str, target: Any = None) -> Any:
        self._searched.add((os.path.join(self._here, finder.path), fullname.rpartition(".")[2]))
        return before(finder, fullname, target)

    def _opening(
        self, before: Callable[..., int], path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        if dir_fd is not None and patched.caller().partition(".")[0] not in _OPENS_BELOW:
            self._why_all = self._why_all or f"it opens {path!r} below a descriptor"
        return before(path, flags, mode, dir_fd=dir_fd)

    def _asking(
        self, before: Callable[..., Any], path: Any, *mode: int, dir_fd: int | None = None, **options: Any
    ) -> Any:
        """Note the paths that a function of `os` gets. The import system has its own functions."""
        self._note(path, self._files, dir_fd=dir_fd)
        return before(path, *mode, dir_fd=dir_fd, **options)

    def _note_listed(self, folder: Any) -> None:
        try:
            self._listed.add(os.path.abspath("." if folder is None else os.fsdecode(folder)))
        except TypeError:  # a descriptor
            self._why_all = self._why_all or "it lists a folder by a descriptor"

    def _is_unread(self, path: str) -> bool:
        try:
            file, folder = self._stat(path), self._stat(path.rpartition("/")[0] or ".")
        except OSError:  # a worker does not show the compiler's sources
            return False
        return (
            stat.S_ISREG(file.st_mode)
            and (path.endswith(".py") or not self._native_code)
            and _identity(file) not in self._files
            and _identity(folder) not in self._folders
            and not any(path.endswith(f"/{name}") for name in self._relative)
        )

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _HEARD:  # thousands
            return
        if event == "open":
            self._note(arguments[0], self._files, makes=bool(arguments[2] & os.O_CREAT))
            with contextlib.suppress(TypeError, ValueError):
                self._note_others(os.fsdecode(arguments[0]))
        elif event == "import":
            module, file = arguments[:2]
            if file is not None:  # native code
                self._note(file, self._files)
                if _may_open_files(module):
                    self._native_code, self._why_all = True, self._why_all or module
        elif event in ("os.scandir", "os.listdir"):
            name = sys._getframe(1).f_globals.get("__name__")
            # The first names the path that it looks for, the second lists the files that it removes.
            if name not in _IMPORT_SYSTEM and (name, type(arguments[0])) != ("shutil", int):
                self._note_listed(arguments[0])
            if event == "os.scandir" and str(name).partition(".")[0] not in _TAKES_NAMES:
                self._note("." if arguments[0] is None else arguments[0], self._folders)
        elif event in _STARTS:
            program = _program(event, arguments)
            if program not in _READ_NO_FILES:
                self._processes, self._why_all = True, f"it starts a process: {program or event}"
        elif event in _CALLS_NATIVE_CODE and arguments[0] is not None:  # which importing ctypes opens
            self._native_code, self._why_all = True, self._why_all or "what ctypes calls"

    def _note(self, path: Any, into: set[tuple[int, int]], makes: bool = False, **options: Any) -> None:
        """Note an open or a look-up of a file. makes: whether the call makes a missing file."""
        try:
            into.add(_identity(self._stat(path, **options)))
        except (TypeError, ValueError):
            return
        except OSError:
            if not makes and not isinstance(path, int):
                self._missed.add(os.path.abspath(os.fsdecode(path)))
                if options.get("dir_fd") is not None:
                    self._why_all = self._why_all or f"it asks for {path!r} below a descriptor"

    def _note_others(self, path: str) -> None:
        """Note the other reads that this open implies. Raises ValueError for a cached file of an unknown form."""
        if not path.startswith("/"):  # of a folder's descriptor, maybe: the event does not say
            self._relative.add("/".join(part for part in os.path.normpath(path).split("/") if part != ".."))
        if path.endswith(".pyc"):  # its source is compared by size and time
            self._note(importlib.util.source_from_cache(path), self._files)

    def _replace(self, patch: patched.Patch, instead: Callable[..., Any]) -> None:
        call = getattr(os, patch.name)
        watched = patch.forever(instead)
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if call in supported:
                supported.add(watched)


def _identity(file: os.stat_result) -> tuple[int, int]:
    """Return the file's identity under any name: files in a Bazel sandbox are links, and a model may follow them."""
    return file.st_dev, file.st_ino


def _may_open_files(module: str) -> bool:
    first = module.partition(".")[0]
    known = first in sys.stdlib_module_names or first in _OPENS_NO_FILES
    return not known or module.startswith(_OPENS_FILES)


def _program(event: str, arguments: tuple[Any, ...]) -> str:
    """Return the program that an event starts, one of the machine without its folder; "" if it does not say."""
    program = str(arguments[0]) if event == "subprocess.Popen" else ""
    return _OF_THE_MACHINE.sub("", program)
