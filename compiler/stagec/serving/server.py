"""A server process: a bundle, its models, a socket, and an end in which no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from stagec.core.telling.errors import Problem, StagecError
from stagec.core.telling.refusal import Refusal
from stagec.loader.bundle import Bundle
from stagec.loader.selection import Policy
from stagec.serving.batching import Batcher
from stagec.serving.metrics import Metrics
from stagec.serving.model import Model
from stagec.serving.rest import Application, Limits


@dataclass(frozen=True)
class Options:
    """How a server runs.

    delay: seconds that a request waits for others. queue: requests of a model that may wait.
    threads: calls at a time; 0: as many as there are cores.
    connections: at a time. drain: seconds after SIGTERM in which the server still takes new requests.
    """

    delay: float = 0.002
    queue: int = 1000
    threads: int = 0
    connections: int = 1000
    drain: float = 5
    limits: Limits = field(default_factory=Limits)


def models_of(
    bundle: Bundle, gather: str, policy: Policy = "executable_only"
) -> tuple[dict[str, Model], dict[str, str]]:
    """Return the models of a bundle by name, loaded, and why each of the other functions is left out.

    A function with variants is several models, FUNCTION-VARIANT.
    """
    models, left_out = {}, {}
    for function in bundle.values():
        for variant in function.variants.values() or [function]:
            try:
                models[variant.name] = Model(variant, bundle.version, gather, policy)
            except Refusal as error:
                left_out[variant.name] = str(error).partition("\n")[0]
    return models, left_out


def listen(host: str, port: int) -> socket.socket:
    """Return a socket of this address; nobody can connect before `serve`. Raises StagecError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        write = "give another --host or --port"
        raise StagecError(Problem("", "", f"{host}:{port}: cannot be listened on: {error.strerror}", write)) from None
    return listener


async def serve(
    models: Mapping[str, Model],
    left_out: Mapping[str, str],
    listener: socket.socket,
    options: Options,
    ready: Callable[[], None],
) -> None:
    """Serve models until SIGTERM or SIGINT. When it returns, every request that came in was answered.

    ready: called when clients can connect.
    """
    metrics = Metrics()
    count = options.threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(count, "stagec-call") as threads:
        free = asyncio.Semaphore(count)
        batchers = {
            name: Batcher(model, options.delay, options.queue, free, threads, metrics) for name, model in models.items()
        }
        application = Application(batchers, left_out, metrics, options.limits)
        config = uvicorn.Config(
            application,
            http=_protocol(options.limits.seconds),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=options.connections,
        )
        await _Server(config, application, options.drain, ready).serve([listener])


class _Server(uvicorn.Server):
    """Uvicorn's server with another end: after SIGTERM it takes requests for a while, and says that it ends."""

    def __init__(
        self, config: uvicorn.Config, application: Application, drain: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._application, self._drain, self._ready = application, drain, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number, seconds in ((signal.SIGTERM, self._drain), (signal.SIGINT, 0)):
            loop.add_signal_handler(number, self._end, seconds)
        yield

    def _end(self, seconds: float) -> None:
        self._application.ending = True
        asyncio.get_running_loop().call_later(seconds, setattr, self, "should_exit", True)


def _protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol that waits no longer than that for headers, and for a client to read its answer."""

    class Protocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._limit()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._limit()

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            if self._timer is not None:
                self._timer.cancel()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._limit()

        def _limit(self) -> None:
            """Start the limit where no request is under way, and end it where one is."""
            under_way = self.cycle is not None and not self.cycle.response_complete
            if under_way and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            elif not under_way and self._timer is None:
                self._timer = self.loop.call_later(seconds, self._close)

        def _close(self) -> None:
            self._timer = None
            if self.transport.get_write_buffer_size():  # a client that does not read its answer keeps it in memory
                self.transport.abort()
            elif self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Protocol
