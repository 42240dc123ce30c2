"""Make LLVM see the aarch64 core that a target names, whatever this machine is.

On aarch64 LLVM reads the core's number and features in /proc/cpuinfo (llvm/lib/TargetParser/Host.cpp). While a module
is compiled, the library reads another path instead: a file in memory, as a machine with this core has it. Whether it
worked is not taken on trust: `cpu` compares what XLA stored with the target's.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from stagec.hardware.aarch64 import Core
from stagec.patches.machine_code import Code, Patch, PatchError

_PATH = b"/proc/cpuinfo\0"


def patches(code: Code, core: Core) -> list[Patch]:
    """Return the changes to `code`, a library with LLVM in it, that let LLVM see that core and nothing else.

    Raises PatchError if this system has no file in memory, or does not name it.
    """
    # The new path must fit in the place of the old one, so it is one of a descriptor, and not of a file in a folder.
    path = b"/dev/fd/%d\0" % _file(core)
    if len(path) > len(_PATH) or not Path(f"/dev/fd/{_file(core)}").exists():
        raise PatchError("this system has no /dev/fd", "mount /proc and /dev")
    return [Patch(at, ctypes.string_at(at, len(_PATH)), path.ljust(len(_PATH), b"\0")) for at in sites(code)]


@functools.cache
def sites(code: Code) -> tuple[int, ...]:
    """Return the addresses of the path, also at the end of a longer string: linkers join them.

    Raises PatchError when the library's file cannot be read.
    """
    return tuple(code.constants(_PATH))


@functools.cache  # a library keeps no more than the path, so the files stay
def _file(core: Core) -> int:
    try:
        file = os.memfd_create("cpuinfo")
        os.write(file, core.cpuinfo)
    except OSError as error:
        raise PatchError(f"this system has no room for a file in memory: {error}") from error
    return file
