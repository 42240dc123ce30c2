"""Where an action's packages are, and byte code of stagec's own modules, if these are not inputs of it.

Packages are not with `packages_are_inputs = False` (rules/toolchain.bzl). Byte code never is: it only makes starts 0.1
s shorter. rules/private/byte_code.py writes it beside the packages.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

_FINGERPRINT = "fingerprint.txt"
_PACKAGES = "site-packages"
_BYTE_CODE = "byte-code"


def find_packages() -> None:
    """Make this process and its children import packages from their place on this machine.

    An entry of PYTHONPATH that is not there gets replaced by the folder beside the file that the link to the packages'
    fingerprint leads to: the link is in Bazel's sandbox, or in a worker's own folder, and the packages are not.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for at, entry in enumerate(entries):
        folder, name = os.path.split(entry)
        fingerprint = os.path.join(folder, _FINGERPRINT)
        if not os.path.exists(entry) and os.path.exists(fingerprint):
            entries[at] = os.path.join(os.path.dirname(os.path.realpath(fingerprint)), name)
            known = (entry, os.path.abspath(entry))
            sys.path[:] = [entries[at] if path in known else path for path in sys.path]
            os.environ["PYTHONPATH"] = os.pathsep.join(entries)


def find_byte_code() -> None:
    """Keep this process and its children from compiling stagec's modules that have byte code on this machine.

    It does so only for the actions and launchers of the rules, beside packages that the rules installed: somebody else
    may be able to write beside any other folder of PYTHONPATH. The folder of byte code becomes the last entry of
    PYTHONPATH, so that a worker's actions see it. It has no modules: Python reads a source, compares its hash, and
    takes the byte code (https://peps.python.org/pep-0552).
    """
    if "STAGEC_PYTHON_ABI" not in os.environ:
        return
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if os.path.basename(entries[-1]) != _BYTE_CODE:
        installed = (os.path.split(os.path.realpath(entry)) for entry in entries)
        beside = (os.path.join(folder, _BYTE_CODE) for folder, name in installed if name == _PACKAGES)
        folder = next(filter(os.path.isdir, beside), None)
        if folder is None:
            return
        entries.append(folder)
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    sys.meta_path.insert(0, _Finder(entries[-1]))


class _Finder:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._there = frozenset(os.listdir(folder))

    def find_spec(self, name: str, path: "Sequence[str] | None", target: object = None, /) -> "ModuleSpec | None":
        if f"{name}.pyc" not in self._there:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(name, spec.loader.path, f"{self._folder}/{name}.pyc")
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, byte_code: str) -> None:
        super().__init__(name, path)
        self._byte_code = byte_code

    def get_data(self, path: str) -> bytes:
        return super().get_data(self._byte_code if path.endswith(".pyc") else path)
