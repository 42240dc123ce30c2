"""The Open Inference Protocol v2 over HTTP, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from stagec.serving import encoding, spans
from stagec.serving.model import Arrays, Model
from stagec.serving.refusal import STATUS, RequestError
from stagec.serving.service import Chosen, Service

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_MODEL = re.compile(r"/v2/models/([\w.+-]+)(?:/versions/([\w.+-]+))?(?:/(ready|config|infer))?")
_REPOSITORY = re.compile(r"/v2/repository/models/([\w.+-]+)/(load|unload)")
_LOOK = 0.02
"""Seconds between checks whether the client is still there."""


class _Answer(NamedTuple):
    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)


class _Disconnected(Exception):
    """The client is gone."""


class Application:
    """An ASGI application that offers the models of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http", scope["type"]
        try:
            answer = await self._answer(scope, receive)
        except _Disconnected:
            return
        except RequestError as error:
            answer = _json({"error": str(error)}, STATUS[error.code])
        closing = [(b"connection", b"close")] if self._service.ending else []
        length = (b"content-length", str(len(answer.body)).encode())
        headers = [*answer.headers, length, *closing]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})

    async def _answer(self, scope: Scope, receive: Receive) -> _Answer:
        service, method, path = self._service, scope["method"], scope["path"].removesuffix("/")
        match = _MODEL.fullmatch(path)
        if match:
            batcher = service.batcher(match[1], match[2])
            if match[3] == "infer":
                _only(method, "POST")
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
                with spans.request(match[1], headers), service.counted(match[1], match[2]) as chosen:
                    return await self._infer(chosen, headers, receive)
            _only(method, "GET", "HEAD")
            if match[3] == "config":
                return _json(service.config(batcher))
            return _json({"name": match[1], "ready": True} if match[3] else batcher.model.metadata())
        if path == "/v2/repository/index":
            _only(method, "POST")
            return _json(list(service.index()))
        if match := _REPOSITORY.fullmatch(path):
            _only(method, "POST")
            async with contextlib.AsyncExitStack() as held:
                body = await self._body(None, receive, held)
                await service.change(match[1], match[2], encoding.read_change(body))
            return _json({})
        if path not in ("/v2", "/v2/health/live", "/v2/health/ready", "/metrics"):
            raise RequestError("not-found", f"there is nothing at {path[:200]}")
        _only(method, "GET", "HEAD")
        if path == "/metrics":
            return _Answer(200, service.metrics.as_text(), ((b"content-type", b"text/plain; version=0.0.4"),))
        if path == "/v2":
            return _json(service.metadata(["binary_tensor_data", "model_repository"]))
        if path == "/v2/health/live":
            return _json({"live": True})
        loading = {"loading": service.loading} if service.loading else {}
        return _json({"ready": service.ready, **loading}, 200 if service.ready else 503)

    async def _infer(self, chosen: Chosen, headers: Mapping[str, str], receive: Receive) -> _Answer:
        if headers.get("content-encoding", "identity") != "identity":
            raise RequestError("encoding", "a compressed body is not supported: send it as it is")
        async with contextlib.AsyncExitStack() as held:
            body = await self._body(headers.get("content-length"), receive, held)
            async with _while_connected(receive):
                return await self._work(chosen, body, headers.get(encoding.HEADER_LENGTH))

    async def _body(self, length: str | None, receive: Receive, held: contextlib.AsyncExitStack) -> bytes:
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

    async def _work(self, chosen: Chosen, body: bytes, header_length: str | None) -> _Answer:
        def read(interface_of: encoding.InterfaceOf) -> encoding.Request:
            return encoding.read(body, header_length, interface_of, chosen.batcher.model.name)

        def write(model: Model, request: encoding.Request, results: Arrays) -> tuple[bytes, int | None]:
            return encoding.write(model.name, model.version, request, results, model.interface)

        answer, end = await self._service.answer(chosen, len(body), read, write)
        if end is None:
            return _Answer(200, answer)
        told = (b"content-type", b"application/octet-stream"), (encoding.HEADER_LENGTH.encode(), str(end).encode())
        return _Answer(200, answer, told)


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
    return _Answer(status, json.dumps(value, separators=(",", ":")).encode())


def _only(method: str, *methods: str) -> None:
    if method not in methods:
        raise RequestError("method", f"the method is {method[:20]}; expected {' or '.join(methods)}")
