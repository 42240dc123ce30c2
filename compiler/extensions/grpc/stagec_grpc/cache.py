"""A cache that speaks the Remote Execution API v2, as Bazel's `grpc://` does, for results of `stagec build`.

Messages are written and read by `core/data/wire.py`: of each, some fields are enough. Their numbers are in
https://github.com/bazelbuild/remote-apis/blob/main/build/bazel/remote/execution/v2/remote_execution.proto and in
https://github.com/googleapis/googleapis/blob/master/google/bytestream/bytestream.proto.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import re
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import SplitResult, unquote

import grpc

from stagec.core.data import wire
from stagec.local.remote import Fault, File

_API = "build.bazel.remote.execution.v2."
_FIND_MISSING = f"{_API}ContentAddressableStorage/FindMissingBlobs"
_BATCH_READ = f"{_API}ContentAddressableStorage/BatchReadBlobs"
_BATCH_UPDATE = f"{_API}ContentAddressableStorage/BatchUpdateBlobs"
_UPDATE_RESULT = f"{_API}ActionCache/UpdateActionResult"
_WRITE = "google.bytestream.ByteStream/Write"
_WRITING = (_FIND_MISSING, _BATCH_UPDATE, _UPDATE_RESULT, _WRITE)

_BATCH = 2 << 20
"""The most bytes of files in a message: servers take messages of 4 MiB."""
_PIECE = 1 << 19
_SHA256 = 1
_NOT_FOUND = 5
_SIZE = 1
"""What is said to be the size of an action: there is no message of one, and servers keep results by both."""
_READ_ALONE = ": to read from it alone, write --no-upload"
_READ_ONLY = ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED")
"""What a server answers that only some may write to."""
_NAMES = {-1: "nothing", **{code.value[0]: code.name for code in grpc.StatusCode}}
_WHY = re.compile("Connection refused|name not found|Socket closed|CERTIFICATE_VERIFY_FAILED|WRONG_VERSION_NUMBER")
"""What is shown of the text of an error: it is gRPC's or the server's, which may be anything."""


class _Absent(Fault):
    """There is no such thing."""


class Connection:
    """A `Connection` of `local/remote.py`.

    url: its path is the name of the instance. patience: seconds until an answer. rate: bytes a second. most: bytes of a
        result.
    """

    def __init__(self, url: SplitResult, patience: float, rate: int, most: int) -> None:
        host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
        options = [
            ("grpc.primary_user_agent", "stagec"),
            ("grpc.max_receive_message_length", most + _BATCH),
            # A message is not larger than what is sent: gRPC limits it before it decompresses.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.per_message_decompression", 0),
            # As over HTTP: variables and records of DNS lead nowhere else.
            ("grpc.enable_http_proxy", 0),
            ("grpc.service_config_disable_resolution", 1),
            # A network may forget a connection that nobody uses while actions run.
            ("grpc.client_idle_timeout_ms", 30_000),
        ]
        if url.scheme == "grpcs":
            roots = ssl.get_default_verify_paths().cafile  # those of HTTPS: SSL_CERT_FILE is for both
            trusted = grpc.ssl_channel_credentials(Path(roots).read_bytes() if roots else None)
            self._channel = grpc.secure_channel(f"dns:///{host}:{url.port or 443}", trusted, options)
        else:
            self._channel = grpc.insecure_channel(f"dns:///{host}:{url.port or 80}", options)
        self._instance, self._patience, self._rate = url.path.strip("/"), patience, rate
        self._folder = f"{self._instance}/" if self._instance else ""
        self._headers = []
        if url.username is not None:
            words = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
            self._headers = [("authorization", f"Basic {base64.b64encode(words).decode()}")]

    def get(self, name: str) -> bytes | None:
        """Return the result of an action; None: there is none."""
        _ = self._told
        request = self._request((2, _digest(name, _SIZE)), (3, 1))  # with its stdout, and not its digest
        try:
            return self._ask(f"{_API}ActionCache/GetActionResult", request)
        except _Absent:
            return None

    def put(self, name: str, content: bytes) -> None:
        """Send the result of an action."""
        self._ask(_UPDATE_RESULT, self._request((2, _digest(name, _SIZE)), (3, content)), len(content))

    def files(self, wanted: Sequence[File]) -> Iterator[tuple[File, Iterator[bytes] | None]]:
        """Yield files with their pieces; None: there is no such file."""
        for files, size in self._batches(wanted):
            if size > self._told[0]:
                yield files[0], self._read(*files[0])
                continue
            request = self._request(*((2, _digest(*file)) for file in files))
            answers = _answers(self._ask(_BATCH_READ, request, size), 3)
            for file in files:
                status, answer = answers.get(file[0].encode(), (-1, b""))
                if status not in (0, _NOT_FOUND):
                    raise _refused(_BATCH_READ, status)
                yield file, None if status else iter(_parts(answer, 2))

    def put_files(self, files: Sequence[File], opened: Callable[[str], BinaryIO]) -> None:
        """Send the files that the server does not have. Raises OSError for one that is gone."""
        most, updates = self._told
        if not updates:
            raise Fault(f"it takes no results{_READ_ALONE}")
        answer = self._ask(_FIND_MISSING, self._request(*((2, _digest(*file)) for file in files)))
        missing = _parts(answer, 2, 1)
        for batch, size in self._batches([file for file in files if file[0].encode() in missing]):
            if size > most:
                with opened(batch[0][0]) as content:
                    self._write(*batch[0], content)
                continue
            blobs = []
            for file in batch:
                with opened(file[0]) as content:
                    blobs.append((2, _message((1, _digest(*file)), (2, content.read()))))
            answers = _answers(self._ask(_BATCH_UPDATE, self._request(*blobs), size), 2)
            for digest, _ in batch:
                if status := answers.get(digest.encode(), (-1, b""))[0]:
                    raise _refused(_BATCH_UPDATE, status)

    def close(self) -> None:
        """End it."""
        self._channel.close()

    @functools.cached_property
    def _told(self) -> tuple[int, bool]:
        """The most bytes of files in a message, and whether results may be sent."""
        answer = self._ask(f"{_API}Capabilities/GetCapabilities", self._request())
        low, high = _number(answer, 4, 1), _number(answer, 5, 1)
        if not low <= 2 <= high:
            raise Fault(f"it speaks versions {low} to {high} of the Remote Execution API, and stagec speaks 2")
        if _SHA256 not in b"".join(_parts(answer, 1, 1)):  # a list of small numbers, in one field or in many
            raise Fault("it has no digests of SHA-256")
        return min(_number(answer, 1, 4) or _BATCH, _BATCH), bool(_number(answer, 1, 2, 1))

    def _ask(self, method: str, request: bytes, size: int = 0) -> bytes:
        """Return the answer. size: of the files in either."""
        try:
            answer: bytes = self._channel.unary_unary(f"/{method}")(request, self._seconds(size), self._headers)
        except grpc.RpcError as error:
            raise _fault(method, error) from error
        return answer

    def _read(self, digest: str, size: int) -> Iterator[bytes] | None:
        request = _message((1, f"{self._folder}blobs/{digest}/{size}"))
        method = self._channel.unary_stream("/google.bytestream.ByteStream/Read")
        pieces = self._pieces(method(request, self._seconds(size), self._headers), size)
        try:
            return itertools.chain([next(pieces, b"")], pieces)
        except _Absent:
            return None

    def _pieces(self, call: Any, size: int) -> Iterator[bytes]:
        started, received = time.monotonic(), 0
        try:
            while (message := self._next(call)) is not None:
                piece = b"".join(_parts(message, 10))
                received += len(piece)
                if received > size:
                    raise Fault("it sends more bytes than an entry has")
                if time.monotonic() - started > self._seconds(received):
                    raise Fault("it is too slow")
                yield piece
        except grpc.RpcError as error:
            raise _fault("Read", error) from error
        finally:
            call.cancel()

    def _next(self, call: Any) -> bytes | None:
        """Return the next message of a stream. The call's own limit is that of all of them."""
        timer = threading.Timer(self._seconds(0), call.cancel)
        timer.daemon = True
        timer.start()
        try:
            return next(call, None)
        finally:
            timer.cancel()

    def _write(self, digest: str, size: int, content: BinaryIO) -> None:
        resource = f"{self._folder}uploads/{uuid.uuid4()}/blobs/{digest}/{size}"

        def requests() -> Iterator[bytes]:
            """In a thread of gRPC, which may come late: the file is closed when the server has answered."""
            at = 0
            with contextlib.suppress(OSError, ValueError):
                while piece := content.read(_PIECE):
                    yield _message((1, resource), (2, at), (3, at + len(piece) == size), (10, piece))
                    at += len(piece)

        try:
            method = self._channel.stream_unary(f"/{_WRITE}")
            answer = method(requests(), self._seconds(size), self._headers)
        except grpc.RpcError as error:
            raise _fault(_WRITE, error) from error
        if _number(answer, 1) != size:
            raise Fault("it takes a part of a file")

    def _batches(self, files: Sequence[File]) -> Iterator[tuple[list[File], int]]:
        """Yield files that go into one message, with their bytes; one that is too large for any is alone."""
        batch, total = list[File](), 0
        for file in files:
            if batch and total + file[1] > self._told[0]:
                yield batch, total
                batch, total = [], 0
            batch.append(file)
            total += file[1]
        if batch:
            yield batch, total

    def _request(self, *fields: tuple[int, bytes | str | int]) -> bytes:
        return _message((1, self._instance), *fields)

    def _seconds(self, size: int) -> float:
        return self._patience + size / self._rate


def _message(*fields: tuple[int, bytes | str | int]) -> bytes:
    return b"".join(
        wire.Record(number, 0, wire.write_varint(value)).encode()
        if isinstance(value, int)
        else wire.Record(number, 2, value.encode() if isinstance(value, str) else value).encode()
        for number, value in fields
    )


def _digest(digest: str, size: int) -> bytes:
    return _message((1, digest), (2, size))


def _parts(message: bytes, *path: int) -> list[bytes]:
    try:
        return list(wire.find(message, path))
    except ValueError as error:
        raise Fault("its answer is not a message of the protocol") from error


def _number(message: bytes, *path: int) -> int:
    try:
        return wire.read_varint((_parts(message, *path) or [b"\0"])[-1], 0)[0]
    except ValueError as error:
        raise Fault("its answer is not a message of the protocol") from error


def _answers(message: bytes, status: int) -> dict[bytes, tuple[int, bytes]]:
    """Return the status of each file in an answer, and what is said of it, by digest. status: the field's number."""
    said = _parts(message, 1)
    return {digest: (_number(part, status, 1), part) for part in said for digest in _parts(part, 1, 1)}


def _refused(method: str, status: int) -> Fault:
    name = _NAMES.get(status, f"status {status}")
    kind = _Absent if status == _NOT_FOUND else Fault
    more = _READ_ALONE if method in _WRITING and name in _READ_ONLY else ""
    return kind(f"it answers {name} to {method.rpartition('/')[2]}{more}")


def _fault(method: str, error: Any) -> Fault:
    """Return what a call has ended with."""
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
            return Fault("it does not answer: it takes too long")
        case grpc.StatusCode.UNAVAILABLE:
            why = _WHY.search(error.details() or "")
            return Fault(f"it does not answer: {why[0] if why else 'UNAVAILABLE'}")
    return _refused(method, error.code().value[0])
