"""Unpacks Debian packages for another architecture, and the emulator, for the repository rule `aarch64_python`.

Arguments: packages. The working directory gets root/, a file system with what they have but documentation, and of
packages for this architecture qemu-aarch64. A package is an archive of ar(5) with a data.tar (deb(5)).
Standard library only.
"""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = "root"
EMULATOR = "qemu-aarch64"
_STATIC = f"./usr/bin/{EMULATOR}-static"


def members(package: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the members of an archive of ar(5). Raises ValueError where it is something else."""
    if not package.startswith(b"!<arch>\n"):
        raise ValueError("not a Debian package")
    at = 8
    while at < len(package):
        header = package[at : at + 60]
        size = int(header[48:58])
        yield header[:16].decode("ascii").strip().rstrip("/"), package[at + 60 : at + 60 + size]
        at += 60 + size + size % 2


def unpack(package: bytes, folder: Path) -> None:
    """Unpack a package into `folder`, whose digest is known to be right."""
    name, data = next((name, data) for name, data in members(package) if name.startswith("data.tar"))
    with tarfile.open(name=name, fileobj=io.BytesIO(data)) as archive:
        if _STATIC in archive.getnames():
            emulator = archive.extractfile(_STATIC)
            assert emulator is not None
            with (folder / EMULATOR).open("wb") as file:
                shutil.copyfileobj(emulator, file)
            (folder / EMULATOR).chmod(0o755)
            return
        for member in archive:
            if not member.name.startswith("./usr/share/"):
                archive.extract(member, folder / ROOT)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        unpack(Path(path).read_bytes(), Path())
