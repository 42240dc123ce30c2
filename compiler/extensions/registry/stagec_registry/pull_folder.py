"""The folder that `pull` writes to: one pull at a time, only files with the right digest, all files or none, no links.

Blobs arrive in `.stagec-pull`, an image layout, and stay there when a pull breaks. Nothing trusts the name of a blob
there. Files get their names when all of them are there and have the right digests.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from stagec.bundle.sources import in_pieces, sha256_of
from stagec.core.data import writing
from stagec.core.data.reading import RegularFile
from stagec.core.messages.errors import Problem, StagecError, blaming
from stagec.core.messages.refusal import LoadError
from stagec.trust.dsse import LARGEST
from stagec_registry import layers, referrers
from stagec_registry.layout import REFERRERS

WORK = ".stagec-pull"
_LOCK = "lock"


class Blob(NamedTuple):
    """The blob of an image's file. digest: SHA-256 (hex); in_tar: whether it is the layer of a container image."""

    digest: str
    in_tar: bool = False


class Folder:
    """A folder that one pull has for itself.

    path: of the folder. there: paths of files with the right digest; they stay unchanged.
    """

    def __init__(self, path: Path, top: int, work: int) -> None:
        """top, work: descriptors of the folder and of its folder of work."""
        self.path, self.there = path, set[str]()
        self._top, self._work = top, work

    @property
    def layout(self) -> Path:
        """The image layout that blobs arrive in."""
        return self.path / WORK

    def keep(self, files: Mapping[str, Blob]) -> None:
        """Remove the leftovers of other pulls, except blobs of `files` (by path) with the digest in their name.

        For a file that is in the folder already, it links the file or writes its layer into the layout: nothing
        downloads it again.
        """
        digests = {blob.digest for blob in files.values()}
        for name in os.listdir(self._work):  # noqa: PTH208
            if name != _LOCK and not (name == "blobs" and stat.S_ISDIR(_mode(name, self._work) or 0)):
                _remove(name, self._work)
        with writing.made(self._work, "blobs/any") as below:
            if not stat.S_ISDIR(_mode("sha256", below) or stat.S_IFDIR):
                _remove("sha256", below)
        with self._blobs() as blobs:
            for name in os.listdir(blobs):  # noqa: PTH208
                if name not in digests or not _is(name, blobs, name) or _links(name, blobs) != 1:
                    _remove(name, blobs)
            for path, blob in files.items():
                with contextlib.suppress(OSError), writing.made(self._top, path, make=False) as parent:
                    if blob.in_tar:
                        self._keep_layer(path, blob.digest, parent, blobs)
                    elif _is(_leaf(path), parent, blob.digest):
                        self.there.add(path)
                        os.link(_leaf(path), blob.digest, src_dir_fd=parent, dst_dir_fd=blobs, follow_symlinks=False)

    def _keep_layer(self, path: str, digest: str, parent: int, blobs: int) -> None:
        file = RegularFile(_leaf(path), parent)
        head, tail = layers.head(path, file.size), layers.tail(file.size)
        if sha256_of(file, before=head, after=tail) == digest:
            self.there.add(path)
            if _mode(digest, blobs) is None:
                writing.file(blobs, digest, itertools.chain([head], in_pieces(file, 0, file.size), [tail]))

    def contents(self, files: Mapping[str, Blob]) -> dict[str, str]:
        """Return the SHA-256 (hex) of each file by its path, once its blob is there. Raises StagecError."""
        digests = {path: blob.digest for path, blob in files.items()}
        with self._blobs() as blobs:
            for path in [path for path, blob in files.items() if blob.in_tar]:
                with blaming(f"{self.path}/{path}"):
                    layer = RegularFile(digests[path], blobs)
                    start, size = layers.find(path, layer)
                    digests[path] = sha256_of(layer, start, size=size)
        return digests

    def keep_too(self, path: str, digest: str) -> None:
        """Keep one more file unchanged, if it has the right digest."""
        with contextlib.suppress(OSError), writing.made(self._top, path, make=False) as parent:
            if _is(_leaf(path), parent, digest):
                self.there.add(path)

    def read(self, digest: str) -> bytes:
        """Return a small blob. Raises OSError, and ValueError if it does not have the digest in its name."""
        with self._blobs() as blobs:
            file = RegularFile(digest, blobs)
            content = file.read(0, min(file.size, LARGEST))
            if hashlib.sha256(content).hexdigest() != digest:
                raise ValueError("its sha256 is another")
            return content

    def name_of(
        self, bundle: str, suffix: str, digest: str, about: Collection[str], taken: Collection[str]
    ) -> str | None:
        """Return the name of a file about the bundle at the path `bundle`; None if all are taken.

        A file by somebody else about the same bundle keeps its name in the folder. digest: of the file. about: of the
        bundle and of its states before additions. taken: names of other files.
        """
        free = [name for name in referrers.names(bundle, suffix) if name not in taken]
        for name in free:
            with contextlib.suppress(OSError), writing.made(self._top, name, make=False) as parent:
                if _is(_leaf(name), parent, digest):
                    return name
        return next((name for name in free if self._about(name, suffix, about) in (None, False)), None)

    def commit(self, files: Mapping[str, Blob], bundle: str, digests: Collection[str]) -> list[str]:
        """Give files their names, all of them or none; return the removed paths: files about another bundle.

        files: blob by path. bundle: path of the bundle. digests: SHA-256 (hex) of that file, and of its states before
        additions. Raises StagecError.
        """
        # The bundle comes last: a process that reads it then has the files beside it.
        new = {path: files[path] for path in sorted(files, key=bundle.__eq__) if path not in self.there}
        uses, at = [blob.digest for blob in new.values()], bundle
        stale = [
            name
            for suffix in REFERRERS
            for name in referrers.names(bundle, suffix)
            if name not in files and self._about(name, suffix, digests) is False
        ]
        try:
            with self._blobs() as blobs, writing.made(self._work, "moves/any") as moves, contextlib.ExitStack() as undo:
                for at, blob in new.items():
                    if not _is(blob.digest, blobs, blob.digest):
                        raise OSError(errno.EBADMSG, f"the downloaded file does not have the sha256 {blob.digest}")
                    with writing.made(self._top, at) as parent:
                        if stat.S_ISDIR(_mode(_leaf(at), parent) or 0):
                            raise OSError(errno.EISDIR, "it is a folder")
                for number, (at, blob) in enumerate(new.items()):
                    self._stage(at, blob, uses.count(blob.digest) == 1, blobs, moves, f"new{number}")
                for number, at in enumerate([*new, *stale]):
                    self._swap(at, f"new{number}" if at in new else None, moves, f"old{number}", undo)
                undo.pop_all()  # all are in their places
        except OSError as error:
            what = f"cannot be written: {writing.reason(error, self.path)}"
            raise StagecError(Problem(f"{self.path}/{at}", "", what)) from error
        return stale

    def _stage(self, path: str, blob: Blob, once: bool, blobs: int, moves: int, name: str) -> None:
        """Put a file among the moves, with its permissions. once: whether no other file has the blob."""
        if once and not blob.in_tar and _links(blob.digest, blobs) == 1:
            os.rename(blob.digest, name, src_dir_fd=blobs, dst_dir_fd=moves)
        else:
            opened = RegularFile(blob.digest, blobs)
            start, size = layers.find(path, opened) if blob.in_tar else (0, opened.size)
            writing.file(moves, name, in_pieces(opened, start, size))
        with writing.made(self._top, path) as parent:
            mode = _mode(_leaf(path), parent) or 0
        opened = RegularFile(name, moves)  # closed with its last reference
        os.fchmod(opened.descriptor, mode & 0o777 if stat.S_ISREG(mode) else 0o644)

    def _swap(self, path: str, new: str | None, moves: int, old: str, undo: contextlib.ExitStack) -> None:
        """Rename a file to its place, or remove the file there; `undo` restores the previous state."""
        with writing.made(self._top, path) as parent:
            leaf = _leaf(path)
            there = _mode(leaf, parent) is not None
            if there:
                os.link(leaf, old, src_dir_fd=parent, dst_dir_fd=moves, follow_symlinks=False)
            undo.callback(self._put_back, path, old if there else None, moves)
            if new is None:
                os.unlink(leaf, dir_fd=parent)
            else:
                os.replace(new, leaf, src_dir_fd=moves, dst_dir_fd=parent)

    def _put_back(self, path: str, old: str | None, moves: int) -> None:
        with contextlib.suppress(OSError), writing.made(self._top, path, make=False) as parent:
            if old is None:
                os.unlink(_leaf(path), dir_fd=parent)
            else:
                os.replace(old, _leaf(path), src_dir_fd=moves, dst_dir_fd=parent)

    def _about(self, name: str, suffix: str, digests: Collection[str]) -> bool | None:
        """Whether a file is about a bundle with one of these digests, or is not for stagec to judge; None: no file."""
        try:
            with writing.made(self._top, name, make=False) as parent:
                file = RegularFile(_leaf(name), parent)
                return file.size > LARGEST or referrers.is_about(suffix, file.read(0, file.size), name, digests)
        except FileNotFoundError:
            return None
        except (OSError, LoadError):
            return True

    @contextlib.contextmanager
    def _blobs(self) -> Iterator[int]:
        with writing.made(self._work, "blobs/sha256/any") as below:
            descriptor = _listing(".", below)
            try:
                yield descriptor
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Folder]:
    """Make a folder and lock it: another pull waits. The folder of work is removed after a success.

    Raises StagecError, naming the path that cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            top = stack.enter_context(writing.folder(path))
            work = _lock(path, top, stack)
            yield Folder(path, top, work)
            # Renamed first: a process that comes now makes its own.
            gone = f"{WORK}.{os.urandom(8).hex()}"
            os.rename(WORK, gone, src_dir_fd=top, dst_dir_fd=top)
            shutil.rmtree(gone, dir_fd=top)
    except OSError as error:
        what = f"cannot be written: {writing.reason(error, path)}"
        raise StagecError(Problem(str(path), "", what)) from error


def _lock(path: Path, top: int, stack: contextlib.ExitStack) -> int:
    """Return the descriptor of the folder of work, locked until `stack` ends. Raises OSError, StagecError."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(WORK, 0o700, dir_fd=top)
        with contextlib.ExitStack() as attempt:
            try:
                work = _listing(WORK, top)
            except FileNotFoundError:
                continue  # another pull has just ended
            except NotADirectoryError:
                what, write = "it is not a folder, and links are not followed", "remove it"
                raise StagecError(Problem(f"{path}/{WORK}", "", what, write)) from None
            attempt.callback(os.close, work)
            if os.fstat(work).st_uid != os.geteuid():
                raise StagecError(Problem(f"{path}/{WORK}", "", "it belongs to somebody else", "remove it"))
            os.fchmod(work, 0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            lock = os.open(_LOCK, flags, 0o600, dir_fd=work)
            attempt.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(WORK, dir_fd=top, follow_symlinks=False), os.fstat(work)):
                    stack.push(attempt.pop_all())
                    return work


def _listing(name: str, below: int) -> int:
    """Return a descriptor of a folder, to list its names. Raises OSError."""
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=below)


def _leaf(path: str) -> str:
    return path.rpartition("/")[2]


def _is(name: str, folder: int, digest: str) -> bool:
    """Whether a folder has a regular file with this SHA-256 (hex) under a name."""
    try:
        return sha256_of(RegularFile(name, folder)) == digest
    except OSError:
        return False


def _links(name: str, folder: int) -> int:
    return os.stat(name, dir_fd=folder, follow_symlinks=False).st_nlink


def _mode(name: str, folder: int) -> int | None:
    """Return type and permissions of the file or folder with a name; None if there is none."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _remove(name: str, folder: int) -> None:
    """Remove a file, or a folder with its content; follow no links."""
    if stat.S_ISDIR(_mode(name, folder) or 0):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)
