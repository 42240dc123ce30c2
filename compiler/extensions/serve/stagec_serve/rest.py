"""The Open Inference Protocol v2 over HTTP, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

import orjson

from stagec_serve import access, encoding, spans
from stagec_serve.model import Arrays, Model
from stagec_serve.refusal import DIGEST, STATUS, RequestError
from stagec_serve.service import Chosen, Service

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_MODEL = re.compile(r"/v2/models/([\w.+-]+)(?:/versions/([\w.+-]+))?(?:/(ready|config|stats|infer))?")
_REPOSITORY = re.compile(r"/v2/repository/models/([\w.+-]+)/(load|unload)")
MOST_HEADERS = 2**16
"""Bytes of the headers of a request."""
_PROBES = ("/v2/health/live", "/v2/health/ready", "/metrics")
_LOG = logging.getLogger("stagec_serve")
_ANY_ZLIB, _PART = 47, 2**20
"""The formats gzip and zlib, which HTTP calls deflate; and the bytes that are inflated at a time."""
_LOOK = 0.02
"""Seconds between checks whether the client is still there."""


class _Answer(NamedTuple):
    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)


class _Disconnected(Exception):
    """The client is gone."""


class State(Protocol):
    """How a server is, as `Service` says it."""

    ending: bool

    @property
    def ready(self) -> bool:
        """Whether requests can be answered."""

    async def exposition(self) -> bytes:
        """Return the metrics for Prometheus."""


class Probes:
    """An ASGI application that says how a server is, and nothing else."""

    def __init__(self, state: State) -> None:
        """state: with `loading`, how far the first load is. It may be of another thread."""
        self._state: Any = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http", scope["type"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        client = ":".join(map(str, scope["client"] or ("unix",)))
        with access.request(f"{scope['method']} {scope['path']}", client, headers) as request_id:
            await self._told(scope, headers, receive, send, request_id)

    async def _told(
        self, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send, request_id: str
    ) -> None:
        closes = self._state.ending
        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADERS:
                raise RequestError("headers", f"the headers are over the limit of {MOST_HEADERS:,} bytes")
            answer = await self._answer(scope, headers, receive)
        except _Disconnected:
            access.note(status=499)
            return
        except RequestError as error:
            answer = _json({"error": str(error)}, STATUS[error.code])
            closes |= error.code in ("headers", "crowded", "slow")
        except Exception as error:  # noqa: BLE001  # the log has it
            _LOG.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            answer = _json({"error": "the server failed; its log says why"}, STATUS["failed"])
        access.note(status=answer.status)
        more = [(b"connection", b"close")] if closes else []
        more += [(b"www-authenticate", b"Bearer")] if answer.status == STATUS["token"] else []
        more += [(b"x-request-id", request_id.encode())] if request_id else []
        told = [*answer.headers, (b"content-length", str(len(answer.body)).encode()), *more]
        await send({"type": "http.response.start", "status": answer.status, "headers": told})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})

    async def _answer(self, scope: Scope, headers: Mapping[str, str], receive: Receive) -> _Answer:
        state, method, path = self._state, scope["method"], scope["path"].removesuffix("/")
        if path not in _PROBES:
            raise RequestError("not-found", f"this port has {', '.join(_PROBES)} alone")
        _only(method, "GET", "HEAD")
        if path == "/metrics":
            return _Answer(200, await state.exposition(), ((b"content-type", b"text/plain; version=0.0.4"),))
        if path == "/v2/health/live":
            return _json({"live": True})
        loading = {"loading": state.loading} if state.loading else {}
        return _json({"ready": state.ready, **loading}, 200 if state.ready else 503)


class Application(Probes):
    """An ASGI application that offers the models of a service.

    crowded: whether there are more connections than there may be; then it answers probes alone.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._service = service
        self.crowded: Callable[[], bool] = lambda: False

    async def _answer(self, scope: Scope, headers: Mapping[str, str], receive: Receive) -> _Answer:
        service, method, path = self._service, scope["method"], scope["path"].removesuffix("/")
        if path in _PROBES:
            if path == "/metrics":
                service.admit(headers)
            return await super()._answer(scope, headers, receive)
        if self.crowded():
            service.metrics.crowded.inc()
            raise RequestError("crowded", "the server has as many connections as it may; try again later")
        service.admit(headers)
        match = _MODEL.fullmatch(path)
        if path == "/v2/models/stats":
            _only(method, "GET", "HEAD")
            return _json(await service.statistics())
        if match:
            batcher = service.batcher(match[1], match[2])
            if match[3] == "infer":
                _only(method, "POST")
                with spans.request(match[1], headers), service.counted(match[1], match[2]) as chosen:
                    return await self._infer(chosen, headers, receive)
            _only(method, "GET", "HEAD")
            if match[3] == "stats":
                return _json(await service.statistics(match[1], match[2]))
            if match[3] == "config":
                return _json(service.config(batcher))
            return _json({"name": match[1], "ready": True} if match[3] else batcher.model.metadata())
        if path == "/v2/repository/index":
            _only(method, "POST")
            with contextlib.ExitStack() as held:
                return _json(service.index(encoding.read_index(await self._body(None, receive, held))))
        if match := _REPOSITORY.fullmatch(path):
            _only(method, "POST")
            with contextlib.ExitStack() as held:
                body = await self._body(None, receive, held)
                await service.change(match[1], match[2], encoding.read_change(body), scope["server"][1])
            return _json({})
        if path != "/v2":
            raise RequestError("not-found", f"there is nothing at {path[:200]}")
        _only(method, "GET", "HEAD")
        return _json(service.metadata(["binary_tensor_data", "model_repository"]))

    async def _infer(self, chosen: Chosen, headers: Mapping[str, str], receive: Receive) -> _Answer:
        encoded = headers.get("content-encoding", "identity")
        if encoded not in ("identity", "gzip", "deflate"):
            raise RequestError("encoding", "the encoding of a body is gzip, deflate or identity")
        with contextlib.ExitStack() as held:
            body = await self._body(headers.get("content-length"), receive, held)
            if encoded != "identity":
                body = await self._inflated(body, held)
            header_length = headers.get(encoding.HEADER_LENGTH)
            self._service.hold(encoding.memory(body, header_length), held)
            async with _while_connected(receive):
                return await self._work(chosen, body, header_length, held)

    async def _body(self, length: str | None, receive: Receive, held: contextlib.ExitStack) -> bytes:
        """Return the body of a request. held: gives its bytes back to the limit of all bodies."""
        limits = self._service.limits
        most = limits.body
        if length is not None and int(length) > most:
            raise RequestError("too-large", f"a body of {length} bytes is over the limit of {most:,}")
        body = bytearray()
        try:
            async with asyncio.timeout(limits.seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Disconnected
                    part = message.get("body", b"")
                    if len(body) + len(part) > most:
                        raise RequestError("too-large", f"the body is over the limit of {most:,} bytes")
                    self._service.hold(len(part), held)
                    body += part
                    more = message.get("more_body", False)
        except TimeoutError:
            raise RequestError("slow", f"the body took over {limits.seconds:g} seconds") from None
        return bytes(body)

    async def _inflated(self, body: bytes, held: contextlib.ExitStack) -> bytes:
        """Return what a compressed body has; each part is counted when it is there, and others run between two."""
        inflate, inflated = zlib.decompressobj(_ANY_ZLIB), bytearray()
        while not inflate.eof:
            try:
                part = inflate.decompress(body, _PART)
            except zlib.error as error:
                raise RequestError("request", f"the body is not what its encoding says: {error}") from None
            if not part and not inflate.eof:
                raise RequestError("request", "the body ends before its compressed data")
            if len(inflated) + len(part) > self._service.limits.body:
                raise RequestError("too-large", f"the body is over the limit of {self._service.limits.body:,} bytes")
            self._service.hold(len(part), held)
            inflated += part
            body = inflate.unconsumed_tail
            await asyncio.sleep(0)
        if inflate.unused_data:
            raise RequestError("request", "bytes follow the body's compressed data")
        return bytes(inflated)

    async def _work(
        self, chosen: Chosen, body: bytes, header_length: str | None, held: contextlib.ExitStack
    ) -> _Answer:
        def read(interface_of: encoding.InterfaceOf) -> encoding.Request:
            strict = self._service.limits.strict
            return encoding.read(body, header_length, interface_of, chosen.batcher.model.name, strict)

        def write(model: Model, request: encoding.Request, results: Arrays) -> tuple[bytes, int | None, str]:
            return *encoding.write(model.name, model.version, request, results, model.interface), model.digest

        answer, end, digest = await self._service.answer(chosen, len(body), held, read, write)
        which = (DIGEST.encode(), digest.encode())
        if end is None:
            return _Answer(200, answer, ((b"content-type", b"application/json"), which))
        length = (encoding.HEADER_LENGTH.encode(), str(end).encode())
        return _Answer(200, answer, ((b"content-type", b"application/octet-stream"), length, which))


@contextlib.asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncIterator[None]:
    """Raise _Disconnected in a block when its client is gone. Most blocks end before anybody looks."""
    loop, block = asyncio.get_running_loop(), asyncio.current_task()
    assert block is not None
    watch: asyncio.Task[None] | None = None
    gone = False

    async def wait() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        block.cancel()

    def look() -> None:
        nonlocal watch
        watch = asyncio.create_task(wait())

    timer = loop.call_later(_LOOK, look)
    try:
        yield
    except asyncio.CancelledError:
        if gone and not block.uncancel():
            raise _Disconnected from None
        raise
    finally:
        timer.cancel()
        if watch is not None:
            watch.cancel()


def _json(value: object, status: int = 200) -> _Answer:
    return _Answer(status, orjson.dumps(value))


def _only(method: str, *methods: str) -> None:
    if method not in methods:
        raise RequestError("method", f"the method is {method[:20]}; expected {' or '.join(methods)}")
