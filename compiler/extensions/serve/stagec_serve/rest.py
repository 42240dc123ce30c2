"""The Open Inference Protocol v2 over HTTP, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson

from stagec_serve import encoding, logs
from stagec_serve.model import Arrays, Model
from stagec_serve.refusal import DIGEST, STATUS, RequestError
from stagec_serve.repository import Repository
from stagec_serve.service import Service

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_MODEL = re.compile(r"/v2/models/([\w.+-]+)(?:/versions/([\w.+-]+))?(?:/(ready|config|stats|infer))?")
_OF_MODEL = {None: "ModelMetadata", "ready": "ModelReady", "config": "ModelConfig", "stats": "ModelStatistics"}
_REPOSITORY = re.compile(r"/v2/repository/models/([\w.+-]+)/(load|unload)")
MOST_HEADERS = 2**16
"""Bytes of the headers of a request."""
_SMALL = 2**16
"""Bytes of a body that is sent with its head, at most."""
_FIRST_LINES: Mapping[int, bytes] = {
    status: b"HTTP/1.1 %d %s" % (status, status.phrase.encode()) for status in HTTPStatus
}
_PROBES = ("/v2/health/live", "/v2/health/ready", "/metrics")
_LOG = logging.getLogger("stagec_serve")
_ANY_ZLIB, _PART = 47, 2**20
"""The formats gzip and zlib, which HTTP calls deflate; and the bytes that are inflated at a time."""


class _Answer(NamedTuple):
    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)


class _Disconnected(BaseException):
    """The client is gone, which is an error of nobody."""


class Probes:
    """An ASGI application that says how a server is, and nothing else."""

    def __init__(self, state: Any) -> None:
        """state: a `Service`, or what has its `ready`, `loading`, `ending` and `exposition`; of any thread."""
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        client, method, closes = ":".join(map(str, scope["client"] or ())), scope["method"], self._state.ending
        cycle = send.__self__  # type: ignore[attr-defined]  # uvicorn's
        with logs.request(f"{method} {scope['path']}", client, headers) as request_id:
            try:
                if sum(map(len, itertools.chain.from_iterable(scope["headers"]))) > MOST_HEADERS:
                    raise RequestError("headers", f"the headers are over the limit of {MOST_HEADERS:,} bytes")
                answer = await self._answer(scope, headers, receive)
            except _Disconnected:
                logs.note(status=499)
                return
            except RequestError as error:
                answer = _json({"error": str(error)}, STATUS[error.code])
                closes |= error.code in ("headers", "crowded", "slow")
            except Exception as error:  # noqa: BLE001  # the log has it
                _LOG.error("%s %s failed", method, scope["path"], exc_info=error)
                answer = _json({"error": "the server failed; its log says why"}, STATUS["failed"])
            logs.note(status=answer.status)
            told = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
            told += [(b"www-authenticate", b"Bearer")] if answer.status == STATUS["token"] else []
            told += [(b"x-request-id", request_id.encode())] if request_id else []
            await _write(cycle, answer.status, told, b"" if method == "HEAD" else answer.body, closes)

    async def _answer(self, scope: Scope, headers: Mapping[str, str], receive: Receive) -> _Answer:
        state, path = self._state, scope["path"].removesuffix("/")
        if path not in _PROBES:
            raise RequestError("not-found", f"this port has {', '.join(_PROBES)} alone")
        _only(scope, "GET", "HEAD")
        if path == "/metrics":
            return _Answer(200, await state.exposition(), ((b"content-type", b"text/plain; version=0.0.4"),))
        if path == "/v2/health/live":
            return _json({"live": True})
        loading = {"loading": state.loading} if state.loading else {}
        return _json({"ready": state.ready, **loading}, 200 if state.ready else 503)


class Application(Probes):
    """An ASGI application that offers the models of a service.

    crowded: whether there are more connections than there may be; then it answers probes alone.
    is_alone: whether a request that is here is the only one.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._service = service
        self.crowded: Callable[[], bool] = lambda: False
        self.is_alone: Callable[[], bool] = lambda: False

    async def _answer(self, scope: Scope, headers: Mapping[str, str], receive: Receive) -> _Answer:
        service, path = self._service, scope["path"].removesuffix("/")
        if path in _PROBES:
            if path == "/metrics":
                service.admit(headers)
            return await super()._answer(scope, headers, receive)
        if self.crowded():
            service.metrics.crowded.inc()
            raise RequestError("crowded", "the server has as many connections as it may; try again later")
        service.admit(headers)
        if path == "/v2/models/stats":
            _only(scope, "GET", "HEAD")
            return _json(await service.told("ModelStatistics"))
        if match := _MODEL.fullmatch(path):
            name, version, of = match.groups()
            if of == "infer":
                _only(scope, "POST")
                with service.counted(name, version) as repository:
                    return await self._infer(name, repository, headers, receive, scope["state"]["connection"])
            service.batcher(name, version)
            _only(scope, "GET", "HEAD")
            answer = await service.told(_OF_MODEL[of], name, version)
            return _json(answer["config"] if of == "config" else answer)
        change = _REPOSITORY.fullmatch(path)
        if change or path == "/v2/repository/index":
            _only(scope, "POST")
            with contextlib.ExitStack() as held:
                form = encoding.CHANGE if change else encoding.INDEX
                asked = encoding.read_small(await self._body(None, receive, held), form)
                if not change:
                    return _json((await service.told("RepositoryIndex", ready=asked.get("ready", False)))["models"])
                await service.change(change[1], change[2], asked.get("parameters", {}), scope["server"][1])
            return _json({})
        if path != "/v2":
            raise RequestError("not-found", f"there is nothing at {path[:200]}")
        _only(scope, "GET", "HEAD")
        return _json(await service.told("ServerMetadata"))

    async def _infer(
        self, name: str, repository: Repository, headers: Mapping[str, str], receive: Receive, connection: Any
    ) -> _Answer:
        service, strict = self._service, self._service.options.strict
        encoded, header_length = headers.get("content-encoding", "identity"), headers.get(encoding.HEADER_LENGTH)
        if encoded not in ("identity", "gzip", "deflate"):
            raise RequestError("encoding", "the encoding of a body is gzip, deflate or identity")

        def write(model: Model, request: encoding.Request, results: Arrays) -> tuple[bytes, int | None, str]:
            return *encoding.write(model.name, model.version, request, results, model.interface), model.digest

        with contextlib.ExitStack() as held:
            body = await self._body(headers.get("content-length"), receive, held)
            if encoded != "identity":
                body = await self._inflated(body, held)
            service.hold(encoding.memory(body, header_length), held)
            answering = asyncio.current_task()
            assert answering is not None
            if connection.is_lost:
                raise _Disconnected
            connection.answering = answering  # it cancels this if its client leaves
            try:
                answer, end, digest = await service.answer(
                    name,
                    repository,
                    len(body),
                    held,
                    lambda interface_of: encoding.read(body, header_length, interface_of, name, strict),
                    write,
                    self.is_alone(),
                )
            except asyncio.CancelledError:
                if connection.is_lost and not answering.uncancel():
                    raise _Disconnected from None
                raise
            finally:
                connection.answering = None
        which = (DIGEST.encode(), digest.encode())
        if end is None:
            return _Answer(200, answer, ((b"content-type", b"application/json"), which))
        length = (encoding.HEADER_LENGTH.encode(), b"%d" % end)
        return _Answer(200, answer, ((b"content-type", b"application/octet-stream"), length, which))

    async def _body(self, length: str | None, receive: Receive, held: contextlib.ExitStack) -> bytes:
        """Return the body of a request. held: has its bytes of the limit of all bodies."""
        service, parts, size, more = self._service, list[bytes](), 0, True
        if length is not None and int(length) > service.body:
            raise RequestError("too-large", f"a body of {length} bytes is over the limit of {service.body:,}")
        cycle = receive.__self__  # type: ignore[attr-defined]  # uvicorn's
        if not cycle.more_body and len(cycle.body) < _SMALL:  # it is all there, as most are
            service.hold(len(cycle.body), held)
            return bytes(cycle.body)
        try:
            async with asyncio.timeout(service.options.timeout if cycle.more_body else None):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Disconnected
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > service.body:
                        raise RequestError("too-large", f"the body is over the limit of {service.body:,} bytes")
                    service.hold(len(parts[-1]), held)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise RequestError("slow", f"the body took over {service.options.timeout:g} seconds") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _inflated(self, body: bytes, held: contextlib.ExitStack) -> bytes:
        """Return what a compressed body has; each part is counted when it is there, and others run between two."""
        inflate, inflated, most = zlib.decompressobj(_ANY_ZLIB), bytearray(), self._service.body
        while not inflate.eof:
            try:
                part = inflate.decompress(body, _PART)
            except zlib.error as error:
                raise RequestError("request", f"the body is not what its encoding says: {error}") from None
            if not part and not inflate.eof:
                raise RequestError("request", "the body ends before its compressed data")
            if len(inflated) + len(part) > most:
                raise RequestError("too-large", f"the body is over the limit of {most:,} bytes")
            self._service.hold(len(part), held)
            inflated += part
            body = inflate.unconsumed_tail
            await asyncio.sleep(0)
        if inflate.unused_data:
            raise RequestError("request", "bytes follow the body's compressed data")
        return bytes(inflated)


async def _write(cycle: Any, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, closes: bool) -> None:
    """Write an answer as uvicorn does, but with one system call for a small one, and without a look at each header."""
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    cycle.keep_alive &= not closes
    lines = [_FIRST_LINES[status], *map(b": ".join, cycle.default_headers), *map(b": ".join, headers)]
    lines += [] if cycle.keep_alive else [b"connection: close"]
    head = b"\r\n".join([*lines, b"", b""])
    # Not `writelines`: before Python 3.14 it never drops an empty part (gh-155888), and some releases of 3.12 and
    # 3.13 never pause the writer then (CVE-2024-12254). To copy a small body is less than a second system call.
    for part in (head + body,) if len(body) < _SMALL else (head, body):
        cycle.transport.write(part)
    cycle.response_started = cycle.response_complete = True
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()


def _json(value: object, status: int = 200) -> _Answer:
    return _Answer(status, orjson.dumps(value))


def _only(scope: Scope, *methods: str) -> None:
    if scope["method"] not in methods:
        raise RequestError("method", f"the method is {scope['method'][:20]}; expected {' or '.join(methods)}")
