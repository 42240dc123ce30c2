"""What builds have made: files by their content, and what each action made of which inputs.

    blobs/AB/CDEF...       a file, by its SHA-256; nobody writes to it any more
    actions/KEY.json       what an action made; of one that reads sources, for each content of those that it read
    digests/ROOT.json      the digests of the files of a workspace, by their states
    digests/ROOT.last.json which results its last build took, for --explain
    builds/NAME            the execution root of a build that runs
    examined/              rows of libraries that stagec does not know (`examining`)

Each file gets its name when it is whole, so nothing is half-written after a kill or on a full disk. Two builds may have
one store: what both write is the same, or the later one stands.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from stagec.core.data import writing
from stagec.core.messages.errors import Problem, StagecError, blaming, mistake

_KEPT = 16
"""The most results of one action: of the contents that its sources had last."""
_FRESH = 2.0
"""Seconds: a file that is so new may change once more, and have the same state (https://git-scm.com/docs/racy-git)."""


class Made(NamedTuple):
    """What an action made once.

    reads: the digests of the sources that it read. outputs: digest and bytes, by path.
    given: what is in its key, by names of files and of other things.
    """

    reads: Mapping[str, str]
    outputs: Mapping[str, tuple[str, int]]
    given: Mapping[str, str]

    def of(self, key: str) -> str:
        """Return the key of the action with a digest of what was read: they name this one of its results."""
        return f"{key} {hashlib.sha256(json.dumps(self.reads, sort_keys=True).encode()).hexdigest()}"


def default_folder() -> Path:
    """Return the store of this user: `stagec` below XDG_CACHE_HOME, or below ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "stagec"


class Store:
    """A store in a folder, which is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._sound: set[str] = set()  # digests of files that this process has read or made
        with _blaming(self.folder):
            for name in ("blobs", "actions", "digests", "builds", "examined"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)

    def find(self, key: str) -> list[Made]:
        """Return what an action of this key made, of different sources, the last one first."""
        path = self.folder / "actions" / f"{key}.json"
        with contextlib.suppress(OSError):
            os.utime(path)  # `trim` removes what nobody has asked for
        return self._made(path)

    def _made(self, record: Path) -> list[Made]:
        try:
            return [
                Made(reads, {name: (of, size) for name, (of, size) in outputs.items()}, given)
                for reads, outputs, given in json.loads(record.read_bytes())
            ]
        except (OSError, ValueError, TypeError, AttributeError):  # damaged, or of another stagec
            return []

    def has(self, made: Made) -> bool:
        """Return whether all outputs are there."""
        return all(self.has_file(digest, size) for digest, size in made.outputs.values())

    def has_file(self, digest: str, size: int) -> bool:
        """Return whether a file is there."""
        try:
            return self._blob(digest).stat().st_size == size
        except OSError:
            return False

    def opened(self, digest: str) -> BinaryIO:
        """Open a file that is there. Raises OSError."""
        return self._blob(digest).open("rb")

    def receive(self, digest: str, size: int, pieces: Iterable[bytes]) -> bool:
        """Take a file from elsewhere, if it has this digest and size. Raises StagecError: a full disk."""
        blob, content = self._blob(digest), hashlib.sha256()

        def checked() -> Iterator[bytes]:
            received = 0
            for piece in pieces:
                content.update(piece)
                received += len(piece)
                yield piece
            if (content.hexdigest(), received) != (digest, size):
                raise _OtherBytes

        with _blaming(self.folder):
            blob.parent.mkdir(exist_ok=True)
            try:
                with writing.folder(blob.parent) as parent:
                    writing.file(parent, blob.name, checked(), 0o444)
            except _OtherBytes:
                return False
        self._sound.add(digest)
        return True

    def place(self, digest: str, path: Path) -> None:
        """Let a file be at a path of an execution root too, unless something is.

        Raises StagecError if it is damaged.
        """
        if digest not in self._sound:  # an action reads it: what that makes is kept as made of this digest
            for _ in self._content(digest):
                pass
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not a hard link: to make or to remove one changes the state of the file, and a worker would say that an input
        # has changed in the middle of an action of another build.
        with contextlib.suppress(FileExistsError):
            path.symlink_to(self._blob(digest))

    def keep(
        self,
        key: str,
        root: Path,
        outputs: Sequence[str],
        reads: Mapping[str, str],
        given: Mapping[str, str] | None = None,
    ) -> Made:
        """Take the outputs of an action that are there, and remember them. Raises StagecError: a full disk."""
        taken: dict[str, tuple[str, int]] = {}
        with _blaming(self.folder):
            for name in outputs:
                path = root / name
                if not path.exists():
                    continue
                digest, size = digest_of(path), path.stat().st_size
                self._sound.add(digest)
                blob = self._blob(digest)
                blob.parent.mkdir(exist_ok=True)
                path.chmod(0o444)
                # A file that is there stays: another build may read it. It is cut off if the machine lost its power.
                if blob.exists() and digest_of(blob) == digest:
                    path.unlink()
                else:
                    path.rename(blob)
                self.place(digest, path)
                taken[name] = digest, size
        made = Made(reads, taken, given or {})
        self.note(key, made)
        return made

    def note(self, key: str, made: Made) -> None:
        """Remember what an action made; its outputs are there. Raises StagecError: a full disk."""
        others = [other for other in self.find(key) if other.reads != made.reads]
        with _blaming(self.folder):
            self._write(f"actions/{key}.json", [tuple(entry) for entry in [made, *others][:_KEPT]])

    def write(self, digest: str, path: str) -> None:
        """Write a file to a path of the user's, in one step. Raises StagecError if what is kept is damaged."""
        with _blaming(Path(path)):
            writing.named(path, self._content(digest))

    def read(self, digest: str) -> bytes:
        """Return the content of a small file. Raises StagecError if it is damaged."""
        return b"".join(self._content(digest))

    def _content(self, digest: str) -> Iterator[bytes]:
        """Yield what a file has. Raises StagecError at its end if that is not what was kept, and removes it."""
        blob, content = self._blob(digest), hashlib.sha256()
        with blaming(str(blob)), blob.open("rb") as file:
            while piece := file.read(1 << 20):
                content.update(piece)
                yield piece
        if content.hexdigest() != digest:
            blob.unlink()
            raise StagecError(Problem(str(blob), "", "it is damaged, and now removed", "build again"))
        self._sound.add(digest)

    def usage(self) -> tuple[int, int]:
        """Return the number of files that actions made, and their bytes."""
        sizes = [path.stat().st_size for path in (self.folder / "blobs").glob("*/*")]
        return len(sizes), sum(sizes)

    def trim(self, most: int) -> int:
        """Remove what was used least recently, until there are `most` bytes; return the bytes that were removed.

        Raises StagecError while a build runs.
        """
        before = self.usage()[1]
        with _lock(self.folder / "builds"):  # none begins
            for other in (self.folder / "builds").iterdir():
                try:
                    with _lock(other, fcntl.LOCK_NB):
                        shutil.rmtree(other)
                except OSError:
                    raise mistake("a build runs, which may read every file", "try again when it has ended") from None
            records = sorted((self.folder / "actions").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
            kept: dict[str, int] = {}
            for record in records:
                made = {digest: size for entry in self._made(record) for digest, size in entry.outputs.values()}
                if sum((kept | made).values()) > most:
                    record.unlink()
                else:
                    kept |= made
            for path in (self.folder / "blobs").glob("*/*"):
                if path.parent.name + path.name not in kept:
                    path.unlink()
        return before - self.usage()[1]

    @contextlib.contextmanager
    def execution_root(self) -> Iterator[Path]:
        """Make an empty folder for a build, and remove it; and those of builds that were killed."""
        builds = self.folder / "builds"
        with _blaming(builds), _lock(builds):  # or another build would remove it before it is held
            for other in builds.iterdir():
                with contextlib.suppress(OSError), _lock(other, fcntl.LOCK_NB):
                    shutil.rmtree(other)
            root = Path(tempfile.mkdtemp(dir=builds))
            held = contextlib.ExitStack()
            held.enter_context(_lock(root))
        with held:
            try:
                yield root
            finally:
                shutil.rmtree(root, ignore_errors=True)

    def digests(self, name: str) -> Digests:
        """Return the digests that are remembered of the files of a workspace or an environment."""
        return Digests(self, f"digests/{name}.json")

    def last(self, name: str) -> dict[str, str]:
        """Return what the last build of a workspace took (`Made.of`), by the first output of each action."""
        with contextlib.suppress(OSError, ValueError):
            keys: dict[str, str] = json.loads((self.folder / "digests" / f"{name}.last.json").read_bytes())
            return keys
        return {}

    def remember(self, name: str, keys: Mapping[str, str]) -> None:
        """Remember those, and those of other actions."""
        known = self.last(name)
        if not keys.items() <= known.items():
            with contextlib.suppress(OSError):
                self._write(f"digests/{name}.last.json", {**known, **keys})

    def _blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest[:2] / digest[2:]

    def _write(self, name: str, value: object) -> None:
        writing.named(str(self.folder / name), [json.dumps(value).encode()])


class _OtherBytes(Exception):
    """A file is not the one that it should be."""


class Digests:
    """The digests of files: a file whose state is as before has the digest that it had."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._known: dict[str, tuple[list[int], str]] = {}  # pairs are lists, as JSON has them
        self._taken: dict[str, tuple[list[int], str]] = {}
        self._fresh = set[str]()
        with contextlib.suppress(OSError, ValueError):
            self._known = json.loads((store.folder / name).read_bytes())

    @property
    def are_new(self) -> bool:
        """Whether nothing was remembered."""
        return not self._known

    def of(self, path: str, read: Callable[[str], str] | None = None) -> str:
        """Return the digest of a file, or what `read` reads in it; the same one each time. Raises OSError.

        What a function of the same name has read is kept: give it another name if it reads something else.
        """
        key = f"{path}\n{read.__qualname__}" if read else path
        if key not in self._taken:
            now = state(path)
            before, digest = self._known.get(key, ([], ""))
            if max(now[-2:]) >= time.time_ns() - int(_FRESH * 1e9):  # before it is read
                self._fresh.add(key)
            self._taken[key] = now, digest if before == now else (read or digest_of)(path)
        return self._taken[key][1]

    def changed(self, paths: Sequence[str]) -> list[str]:
        """Return those of files that have changed since their digests were taken: those may be of other content."""
        changed = []
        for path in paths:
            try:
                same = path not in self._taken or state(path) == self._taken[path][0]
            except OSError:
                same = False
            if not same:
                changed.append(path)
        return changed

    def save(self) -> None:
        """Remember them."""
        lasting = {path: entry for path, entry in self._taken.items() if path not in self._fresh}
        if any(entry != tuple(self._known.get(path, ())) for path, entry in lasting.items()):
            with contextlib.suppress(OSError):
                self._store._write(self._name, {**self._known, **lasting})


def digest_of(path: str | Path) -> str:
    """Return the SHA-256 (hex) of a file. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state(path: str) -> list[int]:
    """Return what is another thing after a file was changed: of which file it is, its size and its times."""
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


@contextlib.contextmanager
def _lock(folder: Path, how: int = 0) -> Iterator[None]:
    """Hold a folder; the kernel lets it go when this process ends.

    how: LOCK_NB, to raise OSError if another process has it, and not to wait.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _blaming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StagecError(Problem(str(error.filename or path), "", f"cannot be written: {error.strerror}")) from error
