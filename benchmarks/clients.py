"""Clients of a server: connections that send one request after the other, each when its answer is there.

python -m benchmarks.clients PORT CLIENTS SECONDS REQUEST [FIRST]: files with all bytes of a request, and of the first
one of each client where that is another. `@@@@@@` in them is the number of the client. Prints JSON.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from pathlib import Path


class _Client(asyncio.Protocol):
    """One connection. It reads as little of an answer as it must: status, length, and that all of it is there."""

    def __init__(self, request: bytes, first: bytes, seconds: list[float], failed: list[str]) -> None:
        self._request, self._next, self._seconds, self._failed = request, first, seconds, failed
        self._received, self._length = b"", -1
        self.ended = asyncio.get_running_loop().create_future()
        self.ending = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._length < 0:
            head, there, _ = self._received.partition(b"\r\n\r\n")
            if not there:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self._failed.append(head.split(b"\r\n")[0].decode())
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            self._length = len(head) + 4 + int(length)
        if len(self._received) >= self._length:
            self._seconds.append(time.perf_counter() - self._began)
            if self.ending:
                self._transport.close()
                self.ended.set_result(None)
            else:
                self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self._failed.append(f"the connection ended: {error}")
            self.ended.set_result(None)

    def _send(self) -> None:
        self._received, self._length = b"", -1
        self._began = time.perf_counter()
        self._transport.write(self._next)
        self._next = self._request


async def load(port: int, clients: int, seconds: float, request: bytes, first: bytes = b"") -> dict[str, float]:
    """Return what clients saw, in seconds and in numbers of requests. first: of each client, where it is another.

    per_second: answers. p50, p99: percentiles of the time of a request. answers: all, before and after that time too.
    failed: how many had another status than 200, or no answer.
    """
    times: list[float] = []
    failed: list[str] = []
    loop = asyncio.get_running_loop()

    def client(number: int) -> _Client:
        own = [data.replace(b"@@@@@@", b"%06d" % number) for data in (request, first or request)]
        return _Client(*own, times, failed)

    connections = [
        (await loop.create_connection(functools.partial(client, number), "127.0.0.1", port))[1]
        for number in range(clients)
    ]
    await asyncio.sleep(seconds / 4)  # the first ones find cold caches
    early = len(times)
    times.clear()
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    while len(times) < 2 * clients:
        await asyncio.sleep(seconds / 10)
    count, lasted = len(times), time.perf_counter() - began
    for client in connections:
        client.ending = True
    await asyncio.wait([client.ended for client in connections], timeout=30)
    for what in failed[:3]:
        print(what, file=sys.stderr)
    ordered = sorted(times[:count]) or [float("inf")]
    middle, late = (ordered[int(len(ordered) * part)] for part in (0.5, 0.99))
    answers = early + len(times)
    return {"per_second": count / lasted, "p50": middle, "p99": late, "answers": answers, "failed": len(failed)}


if __name__ == "__main__":
    port, clients, seconds, *files = sys.argv[1:]
    data = [Path(file).read_bytes() for file in files]
    print(json.dumps(asyncio.run(load(int(port), int(clients), float(seconds), *data))))
