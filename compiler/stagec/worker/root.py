"""The file system of an action: programs and libraries of the machine, packages, and its inputs.

Nothing of the user's is there besides, and no folder in which programs keep the sockets that they are reached by. All
of it is read-only but FOLDER.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence

from stagec.worker import syscalls

FOLDER = "/action"
"""The folder that an action may write to. It is in memory, and ends with the action."""
BELOW = "work/root"
"""The working directory, below what an action may write to. Paths begin with .. where Bazel lays repositories out side
by side."""
WORKING = f"{FOLDER}/{BELOW}"
_TEMPORARY = {"/dev/shm": "shm", "/tmp": "tmp", "/var/tmp": "tmp"}
"""Folders for temporary files, and their names in FOLDER."""

# As distributions, Nix and Guix have them. /sys has the numbers of cores and of NUMA's nodes; libtpu needs them.
_SYSTEM = (
    "/bin",
    "/gnu/store",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix/store",
    "/sbin",
    "/sys/devices/system",
    "/usr",
)
# Not all of /etc: root's actions can read what nobody else can.
_SETTINGS = (
    "alternatives",
    "fonts",
    "group",
    "host.conf",
    "hosts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "passwd",
    "protocols",
    "services",
)
MACHINE = (*_SYSTEM, *(f"/etc/{name}" for name in _SETTINGS))
"""Programs, libraries and settings of the machine, which an action sees."""
DEVICES = tuple(f"/dev/{name}" for name in ("full", "null", "random", "urandom", "zero"))
_STREAMS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_READ_ONLY = syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID


def make(shown: Iterable[str]) -> int:
    """Make what the roots of all actions of this process have in common; return a descriptor of it for `enter`.

    shown: folders and files that are seen under their own paths, links or not. Raises OSError if this process may not
    mount. It is made once: its 50 mounts take 3 ms and more, and each action would wait for them.
    """
    root = syscalls.new_tmpfs()
    # On top of the root of this process: no path leads there but the working directory.
    syscalls.move_mount(root, "/")
    with contextlib.chdir(root):
        for folder in (FOLDER, "/dev", "/etc", "/proc", "/var"):
            os.mkdir(folder[1:])
        for path, name in _TEMPORARY.items():
            os.symlink(f"{FOLDER}/{name}", path[1:])
        for name, target in _STREAMS.items():
            os.symlink(f"/proc/self/{target}", f"dev/{name}")
        for path in (*MACHINE, *DEVICES):
            _show(path, path[1:])
        for path in _both(shown):
            if not _is_below(path, _TEMPORARY):
                _show(path, path[1:], as_link=False)
        syscalls.change_mount(".", on=_READ_ONLY, private=True, below=True)
    return root


def unmount(root: int) -> None:
    """Undo `make`: nothing that is deleted is kept for it."""
    with contextlib.chdir(root):
        os.close(root)
        syscalls.unmount(".")


def enter(root: int, shown: Iterable[str], files: int, folder: str = "", inputs: Sequence[str] = ()) -> None:
    """Let this process, of a new PID namespace, have a root of its own, and see nothing else.

    root: of `make`, with the same `shown`. files: a descriptor of the folder that becomes FOLDER.
    inputs: paths relative to `folder`; they appear in WORKING.
    """
    os.fchdir(root)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.move_mount(files, FOLDER[1:])
    for name in sorted({*_TEMPORARY.values(), "work"}):
        os.mkdir(f"{FOLDER[1:]}/{name}")
    for path in _both(shown):
        for temporary, own in _TEMPORARY.items():
            if _is_below(path, [temporary]):
                _show(path, f"{FOLDER[1:]}/{own}{path.removeprefix(temporary)}", as_link=False)
    os.mkdir(WORKING[1:])
    made = {""}
    for name in inputs:  # of a large model they are many
        parent = name.rpartition("/")[0]
        if parent not in made:
            os.makedirs(f"{WORKING[1:]}/{parent}", exist_ok=True)
            made.add(parent)
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # a link to nowhere; below another input
            _bind(f"{folder}/{name}", f"{WORKING[1:]}/{name}")
    syscalls.change_mount(FOLDER[1:], on=_READ_ONLY | syscalls.MOUNT_ATTR_NODEV, private=True, below=True)
    syscalls.change_mount(FOLDER[1:], off=syscalls.MOUNT_ATTR_RDONLY)
    flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("proc", "proc", "proc", flags)
    syscalls.make_root()


def _both(shown: Iterable[str]) -> list[str]:
    """Return paths, and what they lead to if they are links, without those of the machine."""
    known = {path for given in shown for path in (given, os.path.realpath(given))}
    return sorted(path for path in known if not _is_below(path, _SYSTEM))


def packages() -> list[str]:
    """Return the folders of this interpreter's programs and imports: its own, and those of the module path."""
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    paths = [f"{prefix}/{name}" for prefix in prefixes if prefix != "/" for name in ("bin", "lib", "lib64")]
    paths += [os.path.realpath(sys.executable), *(os.path.abspath(entry) for entry in sys.path if entry)]
    return [path for path in (*paths, *import_roots()) if os.path.exists(path)]


def import_roots() -> list[str]:
    """Return the folders of PYTHONPATH as absolute paths, those of stagec and its extensions where their files are.

    In the folder of a worker's own that Bazel makes with --worker_sandboxing, each of them is a link, by way of others.
    """
    here, name = os.path.abspath(__file__), "/stagec/worker/root.py"
    own, real = here.removesuffix(name), os.path.realpath(here).removesuffix(name)
    given = map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    return [real + path.removeprefix(own) if f"{path}/".startswith(f"{own}/") else path for path in given]


def identity(path: str) -> tuple[int, int] | None:
    """Return what no two files or folders have in common at a time; None: nothing is there."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_dev, state.st_ino


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(f"{path}/".startswith(f"{folder}/") for folder in folders)


def _show(path: str, target: str, as_link: bool = True) -> None:
    """Mount an absolute path, if it exists, at a path below the working directory.

    as_link: whether a link stays one. It may lead by way of others that are not there.
    """
    if os.path.lexists(target) or not os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    if as_link and os.path.islink(path):
        os.symlink(os.readlink(path), target)
    else:
        _bind(path, target)


def _bind(source: str, target: str) -> None:
    """Have a new path show a file or folder, as it is for now."""
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
    syscalls.mount(source, target, flags=syscalls.MS_BIND | syscalls.MS_REC)
