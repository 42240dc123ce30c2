"""The container of a bundle: a stored zip whose `index.json` has the digest of every other member.

A bundle has one encoding (`encode`). A reader checks that the file is that encoding and that every member has its
digest before it hands out a byte, so that nothing parses what was not checked. Standard library only.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagec.runtime.refusal import LoadError

FORMAT = 1
"""Version of the bundle format. 1 (November 2026): the first."""

INDEX = "index.json"


def encode(members: Mapping[str, bytes]) -> bytes:
    """Return the zip of `members`, in their order: nothing compressed, and all that a zip stores besides fixed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


class Archive:
    """A bundle file that was read and checked whole.

    path: where it was read from.
    index: the content of `index.json`.
    """

    def __init__(self, path: str | Path, data: bytes | None = None) -> None:
        """Read and check the file at `path`. Raises LoadError, naming the file and the member at fault.

        data: the bytes, where they are known already; `path` is then what to call them in messages.
        """
        self.path = str(path)
        try:
            data = Path(path).read_bytes() if data is None else data
        except FileNotFoundError:
            raise LoadError("not-found", f"{path}: no such file") from None
        except OSError as error:
            raise LoadError("not-found", f"{path}: cannot be read: {error.strerror}") from error
        self._members = _decode(self.path, data)
        self.index = _read_index(self.path, self._members)
        self._check()

    def __getitem__(self, name: str) -> bytes:
        """Return the bytes of the member `name`. Raises LoadError when the bundle has none."""
        if name not in self._members:
            raise LoadError("format", f"{self.path}: there is no member {name!r}")
        return self._members[name]

    def _check(self) -> None:
        listed = self.index.get("members")
        if not isinstance(listed, dict) or set(listed) != set(self._members) - {INDEX}:
            raise LoadError("digest", f"{self.path}: the index does not list the members that the file has")
        for name, entry in listed.items():
            digest = hashlib.sha256(self._members[name]).hexdigest()
            if not isinstance(entry, dict) or digest != entry.get("sha256"):
                raise LoadError("digest", f"{self.path}: {name} is not what the index says: its sha256 is {digest}")


def _decode(path: str, data: bytes) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(data):
                    raise ValueError(f"{entry.filename} is compressed")
                members[entry.filename] = archive.read(entry)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        raise LoadError("not-a-bundle", f"{path}: not a bundle: {error}") from error
    if INDEX not in members:
        raise LoadError("not-a-bundle", f"{path}: not a bundle: it has no {INDEX}")
    if encode(members) != data:
        raise LoadError("not-a-bundle", f"{path}: not a bundle: the file is not as stagec writes it")
    return members


def _read_index(path: str, members: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        index = json.loads(members[INDEX])
    except ValueError as error:
        raise LoadError("format", f"{path}: {INDEX} is not JSON: {error}") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        found = index.get("format") if isinstance(index, dict) else None
        raise LoadError("format", f"{path}: its format is {found!r}, this version of stagec reads {FORMAT}")
    return index
