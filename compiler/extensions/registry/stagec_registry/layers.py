"""Layers of a container image: tars without compression, the same bytes everywhere.

Format: https://github.com/opencontainers/image-spec/blob/v1.1.1/layer.md, tar as GNU writes it, so that the records
before a file have the same length for every size.

A bundle and each file beside it have a layer each, with that one file below `/models`. A layer has one encoding, like a
bundle: path and size of the file determine all bytes around it, so a reader writes these again and compares. This one
check refuses links, devices, other paths, second entries and wrong sizes, and nothing parses them.

The packages of a server are one layer, of all files of a folder.
"""

from __future__ import annotations

import importlib.util
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from stagec.bundle.sources import in_pieces
from stagec.core.data.reading import RegularFile

FOLDER = "models"
"""The image's folder with the files."""
PACKAGES = "opt/stagec"
"""The image's folder with the packages of a server."""
_END = 2 * tarfile.BLOCKSIZE
"""Bytes of zeros at the end of a tar."""
_UNCHECKED = (1).to_bytes(4, "little")
"""Flags of byte code with the hash of its source; Python does not check this hash at an import."""
_OF_INSTALLERS = "RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"
"""Files of a package's metadata about its installation: the installer, the time and the origin."""


def head(path: str, size: int) -> bytes:
    """Return the bytes before the file in a layer: the records of its folders, and its own record.

    path: below `/models`, in ASCII. size: of the file, in bytes.
    """
    whole = f"{FOLDER}/{path}"
    return b"".join([*_folders(whole), _entry(whole, tarfile.REGTYPE, 0o444, size)])


def tail(size: int) -> bytes:
    """Return the bytes after a file of `size` bytes."""
    return bytes(-size % tarfile.BLOCKSIZE + _END)


def find(path: str, layer: RegularFile) -> tuple[int, int]:
    """Return where the file at `path` is in its layer: start and size, in bytes.

    Raises OSError, and ValueError for a layer that differs from the bytes of `head` and `tail` around a file.
    """
    start = len(head(path, 0))
    size = -1
    if layer.size >= start + _END:
        try:
            record = layer.read(start - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE)
            size = tarfile.TarInfo.frombuf(record, "ascii", "strict").size
        except (tarfile.TarError, ValueError):
            size = -1
    if not 0 <= size == layer.size - start - len(tail(max(size, 0))) or (
        layer.read(0, start) != head(path, size) or layer.read(start + size, layer.size - start - size) != tail(size)
    ):
        raise ValueError(f"its layer is not a tar of this one file, /{FOLDER}/{path}, as `stagec push` writes it")
    return start, size


def of_packages(folder: str) -> Iterator[bytes]:
    """Yield the layer with the packages installed in a folder.

    It leaves out programs (their first line has the path of a Python) and the records of installers. So the same wheels
    give the same layer everywhere. It includes byte code with the hash of its module, but none with the time of a file,
    because the image changes that time. Raises OSError, and ValueError for a link or another irregular file.
    """
    yield from _folders(f"{PACKAGES}/any")
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] == "bin" or ("__pycache__" in name.parts and not _is_current(path)):
            continue
        if name.parent.name.endswith(".dist-info") and name.name in _OF_INSTALLERS:
            continue
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            yield _entry(f"{PACKAGES}/{name}", tarfile.DIRTYPE, 0o755)
            continue
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path} is not a regular file")
        file = RegularFile(path)
        yield _entry(f"{PACKAGES}/{name}", tarfile.REGTYPE, 0o555 if mode & stat.S_IXUSR else 0o444, file.size)
        yield from in_pieces(file, 0, file.size)
        yield bytes(-file.size % tarfile.BLOCKSIZE)
    yield bytes(_END)


def _is_current(path: Path) -> bool:
    """Whether a file is byte code with the hash of the module beside it, or a folder has such a file.

    Source: https://peps.python.org/pep-0552.
    """
    if path.name == "__pycache__":
        return any(map(_is_current, path.iterdir()))
    module = path.parent.parent / f"{path.name.partition('.')[0]}.py"
    if path.suffix != ".pyc" or not module.is_file():
        return False
    return path.read_bytes()[4:16] == _UNCHECKED + importlib.util.source_hash(module.read_bytes())


def _folders(path: str) -> list[bytes]:
    """Return the records of the folders on the way to a path."""
    parts = path.split("/")
    return [_entry("/".join(parts[:depth]), tarfile.DIRTYPE, 0o755) for depth in range(1, len(parts))]


def _entry(name: str, kind: bytes, mode: int, size: int = 0) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.size = kind, mode, size
    return entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")
