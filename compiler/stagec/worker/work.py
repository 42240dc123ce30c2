"""Do the work of an action in its own process, and report facts that its parent cannot see."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from typing import Any

from stagec.worker.root import FOLDER

_MOST = 100
_OF_THE_MACHINE = (FOLDER, "/dev/", "/etc/", "/proc/", "/sys/", "/tmp/", "/usr/", "/var/")


def report(action: Callable[[], int], missed: set[str]) -> bytes:
    """Run an action; return its exit status, the files that it missed, and this process's memory, for its parent.

    action: returns the status. missed: those files, which `note_missed` adds; it is empty afterwards.
    """
    status = 1
    try:
        status = action()
    except SystemExit as error:  # argparse
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - it is reported, and 1 is the status
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    paths = [path for path in sorted(missed) if not (os.path.isabs(path) and _is_read(path))]
    missed.clear()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return json.dumps({"status": status, "missed": paths, "memory": memory}).encode()


def _is_there(path: str, state: Callable[[str], object] = os.lstat) -> bool:
    """Return whether a path exists. state: the original `os.stat`, because a later patch notes the model's requests."""
    try:
        state(path)
    except OSError:
        return False
    return True


def _is_read(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError:
        return False
    return True


def tell_crashes() -> None:
    """Make Python print the stack if this process crashes."""
    faulthandler.enable()


def note_missed(missed: set[str], folder: str, elsewhere: bool) -> None:
    """Collect the failed reads and imports of this process from here on in a set: paths relative to a folder.

    elsewhere: whether it gets absolute paths of other folders too, but for those that programs look for on any machine.
    Paths below an entry of the module path do not matter: they belong to a package, or to the compiler.
    """
    installed = tuple(f"{os.path.abspath(entry)}/" for entry in sys.path)
    below = f"{folder}/"

    def look(path: str) -> None:
        if f"{path}/".startswith(installed) or len(missed) >= _MOST:
            return
        if path.startswith(below):
            if not _is_there(path):
                missed.add(path.removeprefix(below))
        elif elsewhere and not path.startswith(_OF_THE_MACHINE):
            missed.add(path)  # it may be there, and not for this process

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # the working directory may be gone
            if event == "open" and isinstance(arguments[0], str) and not arguments[2] & os.O_CREAT:
                path = os.path.abspath(arguments[0])
                if os.path.isabs(arguments[0]) or path.startswith(below):  # else the model went elsewhere
                    look(path)
            elif event == "import":
                for entry in sys.path:
                    if f"{entry}/".startswith(below) and not f"{entry}/".startswith(installed):
                        module = os.path.normpath(f"{entry}/{arguments[0].replace('.', '/')}")
                        look(f"{module}.py")
                        look(f"{module}/__init__.py")

    sys.addaudithook(hook)
