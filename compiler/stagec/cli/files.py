"""What commands of the command line read, write and print."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.errors import Problem, StagecError

if TYPE_CHECKING:
    from stagec.bundle.safetensors import Tensor
    from stagec.runtime.sources import OnDisk


def write_whole(path: str, data: bytes) -> None:
    """Write a file as `write_parts` does."""
    write_parts(path, [data])


def write_parts(path: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file under a temporary name beside it, then rename it: readers never see half a file.

    parts: what is in it, one after the other.
    Raises StagecError, naming the file, where that is not possible: a full disk, a folder that is read-only.
    """
    target = Path(path)
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
        temporary = None
    except OSError as error:
        raise StagecError(Problem(path, "", f"cannot be written: {error.strerror}")) from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def read(path: str) -> bytes:
    """Return the content of a file. Raises StagecError, naming it."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StagecError(Problem(path, "", f"cannot be read: {error.strerror}")) from error


def on_disk(path: str) -> OnDisk:
    """Return the content of a file that is to be a bundle's member. Raises StagecError, naming it."""
    from stagec.runtime.sources import OnDisk

    try:
        return OnDisk(path)
    except OSError as error:
        raise StagecError(Problem(path, "", f"cannot be read: {error.strerror}")) from error


def read_text(path: str) -> str:
    """Return the content of a file in UTF-8. Raises StagecError, naming it."""
    return read(path).decode("utf-8")


def read_weights(given: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Return the arrays of safetensors files, which are given as NAME=FILE, by name. Raises StagecError."""
    from stagec.bundle import safetensors

    found = {}
    for name, path in (split(text, 2) for text in given):
        try:
            found[name] = safetensors.read(path)
        except OSError as error:
            raise StagecError(Problem(path, "", f"cannot be read: {error.strerror}")) from error
        except ValueError as error:
            raise StagecError(Problem(path, "", f"not a safetensors file: {error}")) from error
    return found


def read_arrays(path: str) -> dict[str, Any]:
    """Return the arrays of an .npz file by name; nothing is unpickled. Raises StagecError, naming the file."""
    import numpy as np

    try:
        with np.load(io.BytesIO(read(path)), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise StagecError(Problem(path, "", "not an .npz file of plain arrays", "write it with numpy.savez")) from error


def split(text: str, parts: int) -> list[str]:
    """Return the values of an option that is `A=B=...`, as many as `parts`. Raises StagecError."""
    values = text.split("=")
    if len(values) != parts:
        raise StagecError(Problem("", "", f"{text!r} has {len(values)} parts divided by '=', {parts} are wanted"))
    return values


def digest(data: bytes) -> dict[str, object]:
    """Return size and digest of what was written, for `--json`."""
    return digest_of([data])


def digest_of(parts: Iterable[bytes | memoryview]) -> dict[str, object]:
    """Return the same of what was written in parts."""
    state, size = hashlib.sha256(), 0
    for part in parts:
        state.update(part)
        size += len(part)
    return {"bytes": size, "sha256": state.hexdigest()}


def print_json(value: object) -> None:
    """Print the result of a command that was given `--json`."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
