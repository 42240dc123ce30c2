"""A cache that machines share: as Bazel has one, for results of `stagec build`.

    PUT and GET /ac/NAME      the result of an action: an ActionResult of Bazel, with digests
    PUT and GET /cas/SHA256   a file

Servers of it are bazel-remote, nginx with WebDAV, and others (https://bazel.build/remote/caching#http-caching). Bazel's
other protocol has the same two kinds of things, and the extension grpc speaks it. What an action read is known when it
has run. So of one that runs a model, an entry has the names of the files that it read, and the result's name has their
digests.

A server can be wrong in any way but one: which outputs an action has is what it says. All else is checked, and the
first fault ends its use in this build.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Protocol, Self
from urllib.parse import SplitResult, unquote, urlsplit

from stagec.core.builds.extensions import imported
from stagec.core.data import strict_json, wire
from stagec.core.messages.errors import Problem, StagecError, mistake
from stagec.core.trees import json_shapes
from stagec.local.store import Made, Store

_PATIENCE = 10.0
"""Seconds until a server has answered, and for which it may be slower than `_RATE`."""
_RATE = 1 << 16
"""Bytes a second."""
_LARGEST_RESULT = 4 << 20
_KEPT = 16
"""The most sets of names of one action."""
_NAMES = json_shapes.shape([[str]])
_GRPC = ("grpc", "grpcs")
_READ_ONLY = (401, 403, 405)
"""What a server answers that only some may write to."""

# Of build.bazel.remote.execution.v2.ActionResult, OutputFile and Digest.
_OUTPUTS, _STDOUT = 2, 5
_PATH, _DIGEST = 1, 2
_HASH, _SIZE = 1, 2


File = tuple[str, int]
"""The digest and the bytes of a file."""


class Fault(Exception):
    """The server cannot be used; the string says why."""


class Connection(Protocol):
    """A connection to a server, for one thread. What it cannot do is a `Fault`."""

    def get(self, name: str) -> bytes | None:
        """Return the result of an action; None: there is none."""

    def put(self, name: str, content: bytes) -> None:
        """Send the result of an action."""

    def files(self, wanted: Sequence[File]) -> Iterator[tuple[File, Iterator[bytes] | None]]:
        """Yield files with their pieces, which nobody has checked; None: there is no such file."""

    def put_files(self, files: Sequence[File], opened: Callable[[str], BinaryIO]) -> None:
        """Send files. Raises OSError for one that is gone."""

    def close(self) -> None:
        """End it."""


class Remote:
    """A cache on a server. url: as the user wrote it. uploads: whether results are sent there too.

    Raises StagecError for a URL that is of no such cache.
    """

    def __init__(self, url: str, store: Store, uploads: bool = True) -> None:
        self._url, self._store = _split(url), store
        self._connection, self._sends = _connect(self._url), _connect(self._url)
        self._fault, self._uploads = "", ThreadPoolExecutor(1) if uploads else None

    def find(self, key: str, outputs: Sequence[str], digests: Callable[[str], str] | None) -> Made | None:
        """Return what an action of this key made on another machine, and take its files into the store.

        outputs: of the action. digests: of the sources that it may have read, by path; raises StagecError, KeyError or
        OSError for others. None: it reads none.
        """
        if self._fault:
            return None
        try:
            for names in self._names(self._connection, key) if digests else [[]]:
                try:
                    reads = {name: digests(name) for name in names} if digests else {}
                except (KeyError, OSError, StagecError):  # a source that is not there any more
                    continue
                if made := self._result(Made(reads, {}, {}), key, outputs):
                    return made
        except Fault as fault:
            self._fault = str(fault)
        return None

    def keep(self, key: str, made: Made, reads_sources: bool) -> None:
        """Send what an action made, while the build goes on."""
        if self._uploads and not self._fault:
            self._uploads.submit(self._send, key, made, reads_sources)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait until all is sent, if nothing was raised."""
        if self._uploads:
            self._uploads.shutdown(cancel_futures=kind is not None)
        self._connection.close()
        self._sends.close()

    @property
    def said(self) -> str:
        """What to tell people, if the server failed."""
        where = self._url._replace(netloc=self._url.netloc.rpartition("@")[2]).geturl()
        what = f"the remote cache was left out: {self._fault}"
        write = "the bundle is as without it; look at the server, or leave --remote-cache out"
        return f"{Problem(where, '', what, write)}\n" if self._fault else ""

    def _result(self, made: Made, key: str, wanted: Sequence[str]) -> Made | None:
        answer = self._connection.get(_result_name(key, made.reads))
        if answer is None:
            return None
        try:
            outputs = dict(map(_read_output, wire.find(answer, [_OUTPUTS])))
        except (ValueError, StopIteration) as error:
            raise Fault("an entry of it is not the result of an action") from error
        if outputs.keys() != set(wanted):
            raise Fault("an entry of it has other files than the action")
        made = made._replace(outputs=outputs)
        lacking = [file for file in dict.fromkeys(outputs.values()) if not self._store.has_file(*file)]
        for (digest, size), pieces in self._connection.files(lacking):
            if pieces is None:  # it was evicted
                return None
            if not self._store.receive(digest, size, pieces):
                raise Fault(f"what it has as cas/{digest} has other bytes")
        return made

    def _names(self, connection: Connection, key: str) -> list[list[str]]:
        """Return the sets of names of files that an action read, the last one first."""
        answer = connection.get(_names_name(key))
        if answer is None:
            return []
        try:
            sets: list[list[str]] = strict_json.parse(next(wire.find(answer, [_STDOUT])), _LARGEST_RESULT)
            _NAMES(sets)
            return sets[:_KEPT]
        except (ValueError, StopIteration) as error:
            raise Fault("an entry of it does not name the files that an action read") from error

    def _send(self, key: str, made: Made, reads_sources: bool) -> None:
        if self._fault:  # since it was submitted
            return
        try:
            self._sends.put_files([*made.outputs.values()], self._store.opened)
            self._sends.put(_result_name(key, made.reads), b"".join(map(_output, made.outputs.items())))
            if reads_sources:  # last: who finds it finds the rest
                names = sorted(made.reads)
                sets = self._names(self._sends, key)
                if names not in sets:
                    text = json.dumps([names, *sets][:_KEPT]).encode()
                    self._sends.put(_names_name(key), wire.Record(_STDOUT, 2, text).encode())
        except Fault as fault:
            self._fault = self._fault or str(fault)
        except OSError:
            pass  # the build itself says that a file is gone


class _HttpConnection:
    """A `Connection` over HTTP."""

    def __init__(self, url: SplitResult) -> None:
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._http = kind(url.hostname or "", url.port, timeout=_PATIENCE)
        self._path = url.path.rstrip("/")
        self._headers = {"User-Agent": "stagec"}
        if url.username is not None:
            words = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(words).decode()}"

    def get(self, name: str) -> bytes | None:
        pieces = self._pieces(f"ac/{name}", _LARGEST_RESULT)
        return None if pieces is None else b"".join(pieces)

    def put(self, name: str, content: bytes) -> None:
        self._put(f"ac/{name}", content)

    def files(self, wanted: Sequence[File]) -> Iterator[tuple[File, Iterator[bytes] | None]]:
        for digest, size in wanted:
            yield (digest, size), self._pieces(f"cas/{digest}", size)

    def put_files(self, files: Sequence[File], opened: Callable[[str], BinaryIO]) -> None:
        for digest, _ in files:
            with opened(digest) as content:
                self._put(f"cas/{digest}", content)

    def _pieces(self, name: str, most: int) -> Iterator[bytes] | None:
        response = self._ask("GET", name)
        if response.status == 404:
            self._end(response)
            return None
        if response.status != 200:
            raise self._refused("GET", response)
        return self._read(response, most)

    def _put(self, name: str, content: bytes | BinaryIO) -> None:
        response = self._ask("PUT", name, content)
        if response.status not in (200, 201, 202, 204):
            raise self._refused("PUT", response)
        self._end(response)

    def close(self) -> None:
        self._http.close()

    def _ask(self, method: str, name: str, content: bytes | BinaryIO | None = None) -> http.client.HTTPResponse:
        size = 0
        if content is not None:
            size = len(content) if isinstance(content, bytes) else os.fstat(content.fileno()).st_size
        headers = {**self._headers, "Content-Length": str(size)} if content is not None else self._headers
        for again in (self._http.sock is not None, False):
            if content is not None and not isinstance(content, bytes):
                content.seek(0)
            try:
                with self._limited(size):
                    self._http.request(method, f"{self._path}/{name}", content, headers)
                    return self._http.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if not again:  # else the server ended a connection that nobody used
                    raise Fault(f"it does not answer: {_said(error)}") from error
        raise AssertionError

    @contextlib.contextmanager
    def _limited(self, size: int = 0) -> Iterator[None]:
        """Give up after a while. A timeout of a socket is for each of its bytes. size: bytes to send."""
        late = threading.Event()

        def end() -> None:
            late.set()
            if self._http.sock:
                with contextlib.suppress(OSError):
                    self._http.sock.shutdown(2)

        timer = threading.Timer(_PATIENCE + size / _RATE, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if late.is_set():  # the end of a connection is one of headers too
            raise TimeoutError("it takes too long")

    def _read(self, response: http.client.HTTPResponse, most: int) -> Iterator[bytes]:
        started, size = time.monotonic(), 0
        try:
            while piece := self._piece(response):
                size += len(piece)
                if size > most:
                    raise Fault("it sends more bytes than an entry has")
                if time.monotonic() - started > _PATIENCE + size / _RATE:
                    raise Fault("it is too slow")
                yield piece
            if response.length:
                raise Fault("it ends in the middle of an entry")
        except (OSError, http.client.HTTPException) as error:
            raise Fault(f"it ends in the middle of an entry: {_said(error)}") from error
        finally:
            if not response.isclosed():
                self.close()

    def _piece(self, response: http.client.HTTPResponse) -> bytes:
        with self._limited() if response.chunked else contextlib.nullcontext():  # the size of a chunk may drip
            return response.read1(1 << 20)

    def _end(self, response: http.client.HTTPResponse) -> None:
        """Read the rest of a short answer, so that the connection can be used again."""
        with contextlib.suppress(Fault):
            for _ in self._read(response, _RATE):
                pass

    def _refused(self, method: str, response: http.client.HTTPResponse) -> Fault:
        self.close()
        more = ""
        if response.status // 100 == 3:
            more = ", which leads elsewhere: name that address"
        elif method == "PUT" and response.status in _READ_ONLY:
            more = ": to read from it alone, write --no-upload"
        return Fault(f"it answers {response.status} to {method}{more}")


def _connect(url: SplitResult) -> Connection:
    """Return a connection. Raises StagecError if it needs the extension grpc, which is not installed."""
    if url.scheme not in _GRPC:
        return _HttpConnection(url)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else its C++ writes to stderr; it is read at the import
    module = imported("stagec_grpc.cache", f"--remote-cache {url.scheme}://")
    connection: Connection = module.Connection(url, _PATIENCE, _RATE, _LARGEST_RESULT)
    return connection


def _split(url: str) -> SplitResult:
    """Return the parts of a URL. Raises StagecError."""
    write = "write the address of a cache, such as http://HOST:8080 or grpc://HOST:9092"
    other = mistake("--remote-cache: it is not the address of a cache", f"{write}; %2F is / in a password")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # its text may have a piece of the password
        raise other from None
    if (
        parts.scheme not in ("http", "https", *_GRPC)
        or not parts.hostname
        or "@" in parts.path  # what is before it is a part of the password
        or parts.query
        or parts.fragment
        or not url.isascii()
    ):
        raise other
    return parts


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _sha256(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _result_name(key: str, reads: Mapping[str, str]) -> str:
    return _sha256("stagec build: result", key, reads)


def _names_name(key: str) -> str:
    return _sha256("stagec build: names", key)


def _output(item: tuple[str, tuple[str, int]]) -> bytes:
    path, (digest, size) = item
    written = wire.Record(_HASH, 2, digest.encode()).encode() + wire.Record(_SIZE, 0, wire.write_varint(size)).encode()
    content = wire.Record(_PATH, 2, path.encode()).encode() + wire.Record(_DIGEST, 2, written).encode()
    return wire.Record(_OUTPUTS, 2, content).encode()


def _read_output(content: bytes) -> tuple[str, tuple[str, int]]:
    path = next(wire.find(content, [_PATH])).decode()
    digest = next(wire.find(content, [_DIGEST, _HASH])).decode("ascii")
    size = next(wire.find(content, [_DIGEST, _SIZE]), b"\0")  # protobuf leaves a 0 out
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ValueError(digest)
    return path, (digest, wire.read_varint(size, 0)[0])
