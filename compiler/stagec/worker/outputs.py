"""Hand over the inputs of an action, and its outputs: the requested files, and nothing else."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence

from stagec.worker import syscalls
from stagec.worker.root import BELOW


class NotHandedOver(Exception):
    """The path of an output has something else; the message says what."""


def check(outputs: Sequence[str], inputs: Sequence[str]) -> None:
    """Raise NotHandedOver for an output that no action may write."""
    for path in outputs:
        if path != os.path.normpath(path) or path.startswith(("/", "../")):
            raise NotHandedOver(f"{path}: an output is a path below the working directory")
        if path in inputs:
            raise NotHandedOver(f"{path} is an input of this action: it cannot be an output")


def hand_over(files: int, folder: str, outputs: Sequence[str]) -> None:
    """Copy the outputs that are there to the same paths below `folder`.

    files: a descriptor of the folder that the action could write to, whose BELOW it worked in. Its processes are dead;
    only that of a series can still write there, and what it writes meanwhile may be taken.
    Raises NotHandedOver for an output that is not a plain file of the action's, for a link may lead anywhere; and for
    one that the disk does not take.
    """
    for path in outputs:
        try:
            # The model may have put a link where an output belongs, or in place of a folder above it. Opened by its
            # path, that would be a file of the worker's.
            source = syscalls.open_beneath(files, f"{BELOW}/{path}")
        except FileNotFoundError:  # Bazel says that it is missing
            continue
        except OSError as error:
            raise NotHandedOver(f"{path} cannot be taken from the action: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(source).st_mode):
                raise NotHandedOver(f"{path} cannot be taken from the action: it is not a plain file")
            _copy(source, f"{folder}/{path}")
        except OSError as error:
            raise NotHandedOver(f"{path} cannot be written: {error.strerror}") from error
        finally:
            os.close(source)


def _copy(source: int, target: str) -> None:
    """Copy a file; the copy has the same holes."""
    folder, name = os.path.split(target)
    os.makedirs(folder, exist_ok=True)
    temporary = f"{folder}/.{name}.part"  # one action alone writes an output
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        size = os.fstat(source).st_size
        for start, end in _data(source, size):
            at = os.lseek(descriptor, start, os.SEEK_SET)
            while at < end:
                copied = os.sendfile(descriptor, source, at, end - at)
                if not copied:
                    raise OSError(errno.EIO, "the file became shorter")
                at += copied
        os.ftruncate(descriptor, size)
        os.fchmod(descriptor, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each part of a file that is not a hole. size: of the file; it may grow meanwhile."""
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there is no more
                return
            raise
        end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        yield start, end


def contents(paths: Sequence[str], most: int) -> dict[str, bytes] | None:
    """Return the content of files by path; None if one is not a plain file, or if they have more bytes than `most`."""
    states_of = [os.stat(path) for path in paths]
    if sum(state.st_size for state in states_of) > most or not all(stat.S_ISREG(state.st_mode) for state in states_of):
        return None
    read: dict[str, bytes] = {}
    for path in paths:
        with open(path, "rb") as file:
            read[path] = file.read(most)
    return read


def states(folder: str, paths: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the state (it changes with the file) of each existing file of `paths`, relative to `folder`."""
    states_of: dict[str, tuple[int, ...]] = {}
    for path in paths:  # of a large model they are many
        try:
            now = os.stat(f"{folder}/{path}")
        except OSError:
            continue
        states_of[path] = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
    return states_of


def check_unchanged(folder: str, before: Mapping[str, tuple[int, ...]]) -> None:
    """Raise NotHandedOver if one of the files of `states` has changed: the output belongs to neither state."""
    now = states(folder, list(before))
    changed = [path for path, state in before.items() if now.get(path) != state]
    if changed:
        raise NotHandedOver(f"{', '.join(changed)} changed while this action read it: build again")


def make_folders(outputs: Sequence[str]) -> list[str]:
    """Make the folders of outputs, and return them."""
    folders = sorted({os.path.dirname(path) for path in outputs})
    for path in folders:
        os.makedirs(path or ".", exist_ok=True)
    return folders
