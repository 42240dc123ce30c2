"""Options, inputs, outputs and messages of the commands."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from stagec.core.data import reading, writing
from stagec.core.messages.errors import Problem, StagecError, blaming, mistake, printable

if TYPE_CHECKING:
    from stagec.bundle.members import OnDisk
    from stagec.bundle.safetensors import Tensor
    from stagec.trust.provenance import Environment

Options: TypeAlias = argparse.Namespace
"""The options of a command: a value for each of its `OPTIONS`."""


def write_whole(path: str, data: bytes) -> None:
    """Write a file as `write_parts` does."""
    write_parts(path, [data])


def write_asked(path: str | None, data: bytes | None) -> None:
    """Write the file of an option that may be left out, if it was given and there is something to write."""
    if path and data is not None:
        write_whole(path, data)


def write_parts(path: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write to the path of `--output` and the like: a file in one step, anything else directly.

    parts: what is in it, one after the other; when they raise something, no file is written. Links are followed
    (`core/data/writing.py`).
    Raises StagecError, naming the file, if that is not possible: a full disk, a folder that is read-only.
    """
    try:
        if sys.stdout:  # the path may be a name of it
            sys.stdout.flush()
        writing.named(path, parts)
    except OSError as error:
        raise StagecError(Problem(path, "", f"cannot be written: {error.strerror}")) from error


def write_below(root: str, name: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file in the same way, at the relative path `name` below the folder `root`.

    Folders on the way are made, and no link below `root` is followed. Raises StagecError, naming the file.
    """
    *_, leaf = name.split("/")
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        with writing.folder(root) as top, writing.made(top, name) as folder:
            writing.file(folder, leaf, parts)
    except OSError as error:
        raise StagecError(Problem(f"{root}/{name}", "", f"cannot be written: {writing.reason(error, root)}")) from error


def read(path: str, most: int = reading.LARGEST) -> bytes:
    """Return the content of a regular file of at most that many bytes. Raises StagecError, naming it."""
    with blaming(path):
        return reading.whole(path, most)


def on_disk(path: str) -> OnDisk:
    """Return the content of a file that becomes a bundle's member. Raises StagecError, naming it."""
    from stagec.bundle.members import OnDisk

    with blaming(path):
        return OnDisk(path)


def read_text(path: str) -> str:
    """Return the content of a file in UTF-8. Raises StagecError, naming it."""
    try:
        return read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise StagecError(Problem(path, "", f"byte {error.start} is not UTF-8 text")) from None


def read_weights(given: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Return the arrays of safetensors files, which are given as NAME=FILE, by name. Raises StagecError."""
    from stagec.bundle import safetensors

    weights = {}
    for name, path in map(pair, given):
        with blaming(path, what="not a safetensors file: "):
            weights[name] = safetensors.read(path)
    return weights


def read_packages(paths: Sequence[str]) -> list[Environment]:
    """Return what lists of packages say (`provenance.read_environment`). Raises StagecError, naming the file."""
    from stagec.trust import provenance

    environments = []
    for path in paths:
        with blaming(path, what="not a list of packages: ", of=(ValueError,)):
            environments.append(provenance.read_environment(read_text(path)))
    return environments


def read_arrays(path: str) -> dict[str, Any]:
    """Return the arrays of an .npz file by name; nothing is unpickled. Raises StagecError, naming the file."""
    import numpy as np

    try:
        with np.load(io.BytesIO(read(path)), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise StagecError(Problem(path, "", "not an .npz file of plain arrays", "write it with numpy.savez")) from error


def pair(text: str) -> tuple[str, str]:
    """Return the name and the value of an option that is `NAME=VALUE`. Raises StagecError."""
    name, divided, value = text.partition("=")
    if not divided:
        raise mistake(f"{text!r} has no '=': write NAME=VALUE")
    return name, value


def split(text: str, parts: int) -> list[str]:
    """Return the values of an option that is `A:B:...`, as many as `parts`; the last may have more of ':'.

    Bazel gives them in one word, which begins with the option: a word that begins with @ would be a file of words. No
    path of Bazel's has ':'. Raises StagecError.
    """
    values = text.split(":", parts - 1)
    if len(values) != parts:
        raise mistake(f"{text!r} has {len(values)} parts divided by ':'; expected {parts}")
    return values


class Sums:
    """Size and digest of the written bytes, for `--json`."""

    def __init__(self) -> None:
        self.size = 0
        self._state = hashlib.sha256()

    def of(self, parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yield `parts`, and add them up."""
        for part in parts:
            self.size += len(part)
            self._state.update(part)
            yield part

    def to_plain(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"bytes": self.size, "sha256": self.sha256()}

    def sha256(self) -> str:
        """Return the hex digest of what was written so far."""
        return self._state.hexdigest()


def digest(data: bytes) -> dict[str, object]:
    """Return the same of what was written at once."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


class Answer(NamedTuple):
    """The output of a command on stdout.

    value: the output with `--json`.
    text: what it says to a person, maybe of a file that anybody may have written; "" for nothing.
    status: the exit status.
    """

    value: object
    text: str = ""
    status: int = 0

    def tell(self, as_json: bool) -> int:
        """Print it, and return the exit status."""
        sys.stdout.write(json.dumps(self.value, indent=1) + "\n" if as_json else printable(self.text))
        return self.status
