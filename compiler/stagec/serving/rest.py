"""The Open Inference Protocol v2 over HTTP, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from stagec.core.builds.version import VERSION
from stagec.serving import encoding
from stagec.serving.batching import Batcher
from stagec.serving.metrics import Metrics
from stagec.serving.refusal import STATUS, RequestError

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_MODEL = re.compile(r"/v2/models/([\w.+-]+)(?:/versions/([\w.+-]+))?(?:/(ready|infer))?")
_REPOSITORY = re.compile(r"/v2/repository/models/([\w.+-]+)/(load|unload)")
_LARGE = 2**16
"""Bytes of JSON that are read in a thread, so that other requests do not wait for it."""


@dataclass(frozen=True)
class Limits:
    """What one request, and all together, may take.

    body: bytes of a request's body. bodies: bytes of all bodies that the server holds.
    seconds: for the body of a request to arrive, and then for its answer to be made.
    """

    body: int = 2**26
    bodies: int = 2**29
    seconds: float = 60


class _Answer(NamedTuple):
    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)


class _Disconnected(Exception):
    """The client is gone."""


class Application:
    """An ASGI application that offers models. ending: whether the server ends: it is not ready any more."""

    def __init__(
        self, batchers: Mapping[str, Batcher], left_out: Mapping[str, str], metrics: Metrics, limits: Limits
    ) -> None:
        """batchers: of the models by name. left_out: why functions of the bundle are not offered, by name."""
        self._batchers, self._left_out = batchers, left_out
        self._metrics, self._limits = metrics, limits
        self._held = 0
        self.ending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http", scope["type"]
        try:
            answer = await self._answer(scope, receive)
        except _Disconnected:
            return
        except RequestError as error:
            answer = _json({"error": str(error)}, STATUS[error.code])
        closing = [(b"connection", b"close")] if self.ending else []
        length = (b"content-length", str(len(answer.body)).encode())
        headers = [*answer.headers, length, *closing]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})

    async def _answer(self, scope: Scope, receive: Receive) -> _Answer:
        method, path = scope["method"], scope["path"].removesuffix("/")
        match = _MODEL.fullmatch(path)
        if match:
            batcher = self._batcher(match[1], match[2])
            if match[3] == "infer":
                _only(method, "POST")
                return await self._counted(batcher, scope, receive)
            _only(method, "GET", "HEAD")
            return _json({"name": match[1], "ready": True} if match[3] else batcher.model.metadata())
        if path == "/v2/repository/index":
            _only(method, "POST")
            return _json(list(self._index()))
        if match := _REPOSITORY.fullmatch(path):
            _only(method, "POST")
            what = f"{match[1]}: this server does not {match[2]} models; it has those of one bundle"
            raise RequestError("unsupported", what)
        if path not in ("/v2", "/v2/health/live", "/v2/health/ready", "/metrics"):
            raise RequestError("not-found", f"there is nothing at {path[:200]}")
        _only(method, "GET", "HEAD")
        if path == "/metrics":
            return _Answer(200, self._metrics.as_text(), ((b"content-type", b"text/plain; version=0.0.4"),))
        if path == "/v2":
            extensions = ["binary_tensor_data", "model_repository"]
            return _json({"name": "stagec", "version": VERSION, "extensions": extensions})
        if path == "/v2/health/live":
            return _json({"live": True})
        return _json({"ready": not self.ending}, 503 if self.ending else 200)

    def _batcher(self, name: str, version: str | None) -> Batcher:
        if name in self._left_out:
            raise RequestError("unavailable", self._left_out[name])
        batcher = self._batchers.get(name)
        if batcher is None:
            models = ", ".join(self._batchers)
            raise RequestError("not-found", f"there is no model {name[:200]}; the models are {models}")
        if version not in (None, batcher.model.version):
            raise RequestError("not-found", f"{name} has version {batcher.model.version} and no other")
        return batcher

    def _index(self) -> Iterable[dict[str, str]]:
        for name, batcher in self._batchers.items():
            yield {"name": name, "version": batcher.model.version, "state": "READY", "reason": ""}
        for name, reason in self._left_out.items():
            yield {"name": name, "state": "UNAVAILABLE", "reason": reason}

    async def _counted(self, batcher: Batcher, scope: Scope, receive: Receive) -> _Answer:
        status = 499  # a client that is gone, as nginx counts it
        try:
            answer = await self._infer(batcher, scope, receive)
            status = answer.status
        except RequestError as error:
            status = STATUS[error.code]
            raise
        finally:
            self._metrics.requests.labels(batcher.model.name, status).inc()
        return answer

    async def _infer(self, batcher: Batcher, scope: Scope, receive: Receive) -> _Answer:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if headers.get("content-encoding", "identity") != "identity":
            raise RequestError("encoding", "a compressed body is not supported: send it as it is")
        async with contextlib.AsyncExitStack() as held:
            body = await self._body(headers.get("content-length"), receive, held)
            with self._metrics.seconds.labels(batcher.model.name).time():
                work = asyncio.create_task(self._work(batcher, body, headers.get(encoding.HEADER_LENGTH)))
                gone = asyncio.create_task(_end_of_client(receive))
                try:
                    waits = {work, gone}
                    await asyncio.wait(waits, timeout=self._limits.seconds, return_when=asyncio.FIRST_COMPLETED)
                    if work.done():
                        return work.result()
                    if gone.done():
                        raise _Disconnected
                    raise RequestError("timeout", f"{batcher.model.name} took over {self._limits.seconds:g} seconds")
                finally:
                    work.cancel()
                    gone.cancel()
                    await asyncio.wait({work, gone})

    async def _body(self, length: str | None, receive: Receive, held: contextlib.AsyncExitStack) -> bytes:
        """Return the body of a request. held: gives its bytes back to the limit of all bodies."""
        most = self._limits.body
        if length is not None and int(length) > most:
            raise RequestError("too-large", f"a body of {length} bytes is over the limit of {most:,}")
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Disconnected
                    part = message.get("body", b"")
                    if len(body) + len(part) > most:
                        raise RequestError("too-large", f"the body is over the limit of {most:,} bytes")
                    if self._held + len(part) > self._limits.bodies:
                        what = "the server holds as many bytes of requests as it may; try again later"
                        raise RequestError("busy", what)
                    self._hold(len(part))
                    held.callback(self._hold, -len(part))
                    body += part
                    more = message.get("more_body", False)
        except TimeoutError:
            raise RequestError("slow", f"the body took over {self._limits.seconds:g} seconds") from None
        return bytes(body)

    def _hold(self, count: int) -> None:
        self._held += count

    async def _work(self, batcher: Batcher, body: bytes, header_length: str | None) -> _Answer:
        model = batcher.model

        def write() -> tuple[bytes, int | None]:
            return encoding.write(model.name, model.version, request, results, model.interface)

        request = await _maybe_in_thread(len(body), lambda: encoding.read(body, header_length, model.interface))
        results = await batcher.call(request.arrays)
        answer, end = await _maybe_in_thread(sum(array.nbytes for array in results), write)
        if end is None:
            return _Answer(200, answer)
        told = (b"content-type", b"application/octet-stream"), (encoding.HEADER_LENGTH.encode(), str(end).encode())
        return _Answer(200, answer, told)


async def _end_of_client(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _maybe_in_thread(size: int, work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work) if size > _LARGE else work()


def _json(value: object, status: int = 200) -> _Answer:
    return _Answer(status, json.dumps(value, separators=(",", ":")).encode())


def _only(method: str, *methods: str) -> None:
    if method not in methods:
        raise RequestError("method", f"the method is {method[:20]}; expected {' or '.join(methods)}")
