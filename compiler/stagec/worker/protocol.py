"""The messages between Bazel and a persistent worker, as far as stagec uses them.

The messages are those of src/main/protobuf/worker_protocol.proto of Bazel; each has its length before it, as a varint.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from stagec.core.data import wire


@dataclass(frozen=True)
class Request:
    """A blaze.worker.WorkRequest.

    arguments: the lines of the action's parameter file.
    inputs: paths of the files that the action may read, relative to the worker's first current folder.
    request_id: the response must repeat it; 0 if the worker gets one request at a time.
    cancel: whether this asks to end the work on the request of this id, and is not work itself.
    """

    arguments: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    request_id: int = 0
    cancel: bool = False

    def encode(self) -> bytes:
        """Return the message of work that is the only one at a time, with its length before it."""
        records = [wire.Record(1, 2, word.encode()) for word in self.arguments]
        records += [wire.Record(2, 2, wire.Record(1, 2, path.encode()).encode()) for path in self.inputs]
        return _framed(records)


@dataclass(frozen=True)
class Response:
    """A blaze.worker.WorkResponse. output: what the user sees; was_cancelled: nothing was made, as Bazel asked."""

    exit_code: int
    output: str = ""
    request_id: int = 0
    was_cancelled: bool = False

    def encode(self) -> bytes:
        """Return the message with its length before it."""
        numbers = {1: self.exit_code, 3: self.request_id, 4: int(self.was_cancelled)}
        records = [wire.Record(field, 0, wire.write_varint(value)) for field, value in numbers.items()]
        return _framed([*records, wire.Record(2, 2, self.output.encode("utf-8", "replace"))])

    @classmethod
    def read(cls, file: IO[bytes]) -> Response:
        """Wait for a response. Raises EOFError if the worker is gone."""
        length = b""
        while not length or length[-1] & 0x80:
            length += _exactly(file, 1)
        fields = {record.field: record for record in wire.records(_exactly(file, wire.read_varint(length, 0)[0]))}
        numbers = [wire.read_varint(fields[field].payload, 0)[0] if field in fields else 0 for field in (1, 3, 4)]
        output = fields[2].payload.decode() if 2 in fields else ""
        return cls(numbers[0], output, numbers[1], bool(numbers[2]))


class Requests:
    """The requests that come in on a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray()

    def next(self) -> Request | None:
        """Wait for a request and return it; None when there will be none. Raises ValueError for anything else."""
        while (request := self._take()) is None:
            if not self._receive():
                return None
        return request

    def wait(self, seconds: float) -> bool:
        """Return whether there is something to read; wait for it, at the most so long."""
        return bool(self._buffer or select.select([self], [], [], seconds)[0])

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self._descriptor

    def cancelled(self, more: bool) -> bool:
        """Return whether Bazel cancels the request that was last, or is gone. more: whether there is something to read.

        Raises ValueError for another request: it comes when this one is answered.
        """
        if more and not self._receive():
            return True
        request = self._take()
        if request and not request.cancel:
            raise ValueError("a second request before the first was answered")
        return bool(request)

    def _receive(self) -> bool:
        received = os.read(self._descriptor, 1 << 16)
        self._buffer += received
        return bool(received)

    def _take(self) -> Request | None:
        """Return the first request in the received bytes; None while it is incomplete."""
        try:
            size, start = wire.read_varint(bytes(self._buffer[:10]), 0)
        except ValueError:
            if len(self._buffer) < 10:
                return None
            raise
        if len(self._buffer) < start + size:
            return None
        message = bytes(self._buffer[start : start + size])
        del self._buffer[: start + size]
        return _request(message)


def _framed(records: Sequence[wire.Record]) -> bytes:
    """Return a message with its length before it."""
    message = b"".join(record.encode() for record in records)
    return wire.write_varint(len(message)) + message


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _request(message: bytes) -> Request:
    arguments, inputs, numbers = [], [], {3: 0, 4: 0}
    for record in wire.records(message):
        if record.field == 1:
            arguments.append(record.payload.decode())
        elif record.field == 2:  # blaze.worker.Input: a path, and a digest, which this ignores
            path = next((field.payload for field in wire.records(record.payload) if field.field == 1), b"")
            inputs.append(path.decode())
        elif record.field in numbers:
            numbers[record.field], _ = wire.read_varint(record.payload, 0)
    return Request(tuple(arguments), tuple(inputs), numbers[3], bool(numbers[4]))
