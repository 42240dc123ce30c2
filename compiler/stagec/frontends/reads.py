"""Which of its declared files a process read, so that Bazel can pass over edits of the others.

Python tells audit hooks what it opens (https://docs.python.org/3/library/audit_events.html). It does not tell them of
`os.stat`, which has a file's size, so that is watched here; nor of what native code and other processes open:
safetensors opens files in Rust. Where native code of others was loaded, only Python sources can be unread; where a
process was started, no file can. Which files there are, Bazel knows without this: their names are in the action's
command line, so a file more or less runs the action again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from stagec.frontends import patched

_STARTS = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen"}
)
"""Events of a new process."""
_STARTS_SILENTLY = frozenset({"multiprocessing.popen_forkserver", "multiprocessing.popen_spawn_posix"})
"""Modules that are imported to start one without an event."""
_CALLS_NATIVE_CODE = frozenset({"ctypes.dlopen", "ctypes.dlsym", "ctypes.dlsym/handle"})
_HEARD = frozenset({"open", "import", "os.scandir"}) | _STARTS | _CALLS_NATIVE_CODE
_OPENS_NO_FILES = frozenset({"jax_cuda13_plugin", "jaxlib", "ml_dtypes", "msgpack", "numpy", "scipy", "yaml"})
"""Packages whose native code opens no file of the user's by its path, but for the modules that follow."""
_OPENS_FILES = ("_dbm", "_gdbm", "_sqlite3", "scipy.io.")
_TAKES_NAMES = frozenset({"glob", "importlib", "os", "pathlib", "shutil"})
"""Python modules that ask `os.scandir` for names alone; its entries have sizes too."""


class Reads:
    """What this process reads from here on. Nothing ends that: have one, in a process that ends soon."""

    def __init__(self) -> None:
        self._stat = os.stat
        self._files: set[tuple[int, int]] = set()
        self._folders: set[tuple[int, int]] = set()
        self._relative: set[str] = set()
        self._native_code = self._processes = False
        for patch in patched.STAT:
            self._watch(patch)
        sys.addaudithook(self._hear)

    def unread(self, paths: Sequence[str]) -> list[str]:
        """Return those of `paths`, declared files, whose content did not matter so far."""
        if self._processes or not sys.modules.keys().isdisjoint(_STARTS_SILENTLY):
            return []
        names = {path.rpartition("/")[2] for path in paths}
        for module in list(sys.modules.values()):  # what was imported before counts too
            file = getattr(module, "__dict__", {}).get("__file__")
            if isinstance(file, str) and file.rpartition("/")[2] in names:
                self._note(file, self._files)
        return [path for path in paths if self._is_unread(path)]

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
            self._note(arguments[0], self._files)
            with contextlib.suppress(TypeError, ValueError):
                self._note_others(os.fsdecode(arguments[0]))
        elif event == "import":
            module, file = arguments[:2]
            if file is not None:  # native code
                self._note(file, self._files)
                self._native_code |= _may_open_files(module)
        elif event == "os.scandir" and not _takes_names(sys._getframe(1)):
            self._note("." if arguments[0] is None else arguments[0], self._folders)
        elif event in _STARTS:
            self._processes = True
        elif event in _CALLS_NATIVE_CODE and arguments[0] is not None:  # which importing ctypes opens
            self._native_code = True

    def _note(self, path: Any, into: set[tuple[int, int]], **options: Any) -> None:
        with contextlib.suppress(OSError, TypeError, ValueError):
            into.add(_identity(self._stat(path, **options)))

    def _note_others(self, path: str) -> None:
        """Note what else is read where this path is opened. Raises ValueError for a cached file of an unknown form."""
        if not path.startswith("/"):  # of a folder's descriptor, maybe: the event does not say
            self._relative.add("/".join(part for part in os.path.normpath(path).split("/") if part != ".."))
        if path.endswith(".pyc"):  # its source is compared by size and time
            self._note(importlib.util.source_from_cache(path), self._files)

    def _watch(self, patch: patched.Patch) -> None:
        """Note what a function of `os` is asked for. The import system has functions of its own."""
        call = getattr(os, patch.name)

        def telling(before: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
            def tell(path: Any, *, dir_fd: int | None = None, **options: Any) -> os.stat_result:
                self._note(path, self._files, dir_fd=dir_fd)
                return before(path, dir_fd=dir_fd, **options)

            return tell

        watched = patch.forever(telling)
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if call in supported:
                supported.add(watched)


def _identity(file: os.stat_result) -> tuple[int, int]:
    """Return which file it is, by whatever name: files in a Bazel sandbox are links, which a model may follow."""
    return file.st_dev, file.st_ino


def _may_open_files(module: str) -> bool:
    first = module.partition(".")[0]
    known = first in sys.stdlib_module_names or first in _OPENS_NO_FILES
    return not known or module.startswith(_OPENS_FILES)


def _takes_names(caller: FrameType) -> bool:
    return str(caller.f_globals.get("__name__")).partition(".")[0] in _TAKES_NAMES
