"""A server process: a bundle, its models, a socket, and a shutdown that loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import resource
import signal
import socket
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stagec.core.builds.extensions import imported
from stagec.core.messages.errors import StagecError, mistake
from stagec.core.messages.refusal import Refusal
from stagec.loader.bundle import Bundle
from stagec.loader.selection import Policy
from stagec.pjrt import clients
from stagec_serve.batching import Batcher
from stagec_serve.metrics import Metrics
from stagec_serve.model import Model
from stagec_serve.repository import Repository
from stagec_serve.rest import MOST_HEADERS, Application, Probes
from stagec_serve.sequences import Sequences
from stagec_serve.service import Service
from stagec_serve.trust import LOOK, Certificates, Tokens, identity
from stagec_serve.workers import Link

Tell = Callable[[str], None]
"""Takes how far loading is, for people."""
Load = Callable[[Tell], tuple[Repository, Mapping[str, Model]]]
"""Loads a bundle: a repository without batchers, and its models by name."""
Stop = Callable[[], Coroutine[Any, Any, None]]
"""Ends what answers another protocol, when it has answered what came."""
_CGROUPS = Path("/sys/fs/cgroup")
_ATTACHING = 0.05
"""Seconds in which asyncio makes connections of what it has accepted."""
_LAST = 0.3
"""Seconds between the last connection and the end of those that have no request."""
_BACKLOG = 2048
"""Connections that wait to be accepted, at most."""


def models_of(
    bundle: Bundle,
    gather: str,
    policy: Policy = "executable_only",
    tell: Tell = lambda _: None,
    is_one_of_many: bool = False,
) -> tuple[dict[str, Model], dict[str, str]]:
    """Return the models of a bundle by name, loaded, and why each of the other functions is left out.

    A function with variants is several models, FUNCTION-VARIANT. tell: is called before each with how many there are.
    is_one_of_many: whether other processes answer requests too; then no model keeps state.
    """
    models: dict[str, Model] = {}
    left_out: dict[str, str] = {}
    variants = [variant for function in bundle.values() for variant in function.variants.values() or [function]]
    for number, variant in enumerate(variants):
        tell(f"{number} of {len(variants)} models are loaded")
        if is_one_of_many and (states := variant.usage.states):
            what = f"it keeps {', '.join(states)} for a sequence, in one process"
            left_out[variant.name] = f"{what}: start the server without --workers"
            continue
        try:
            model = Model(variant, bundle.version, gather, policy)
        except Refusal as error:
            left_out[variant.name] = str(error).partition("\n")[0]
            continue
        if why := _other_state(model, models.values()):
            left_out[variant.name] = why
        else:
            model.digest = bundle.digest
            models[variant.name] = model
    return models, left_out


def _other_state(model: Model, others: Iterable[Model]) -> str:
    """Return why a model cannot share its states with others; "" if it can."""
    for other in others:
        for name in model.states.keys() & other.states.keys():
            if model.avals(name) != other.avals(name):
                mine, theirs = (", ".join(map(str, which.avals(name))) for which in (model, other))
                return f"its state {name} is {mine}, and that of {other.name} is {theirs}"
    return ""


def cores() -> int:
    """Return how many calls may run at a time: the cores of this process, or fewer if its cgroup may use less time.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max), and cpu.cfs_quota_us of version 1.
    """
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines():
            _, controllers, place = line.split(":", 2)
            root = _CGROUPS / "cpu" if controllers else _CGROUPS
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            folder = root / place.lstrip("/")
            for above in (folder, *folder.parents) if "cpu" in controllers.split(",") or not controllers else ():
                if above.is_relative_to(root):
                    with contextlib.suppress(OSError, ValueError):  # "max" is not a number, and -1 means no limit
                        quota, period = map(int, " ".join((above / f).read_text("utf-8") for f in files).split())
                        count = min(count, max(1, math.ceil(quota / period)) if quota > 0 else count)
    return count


def listen(host: str, port: int) -> socket.socket:
    """Return a socket of this address; nobody can connect before `serve`. Raises StagecError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        write = "give another --host or --port"
        raise mistake(f"{host}:{port}: cannot listen there: {error.strerror}", write) from None
    return listener


def listeners(count: int, host: str, port: int) -> list[socket.socket]:
    """Return sockets of one address for several processes, as `listen` does.

    The kernel gives each connection to one of them, by the client's address. They listen at once: a connection waits
    for a process that starts again.
    """
    sockets = [listen(host, port)] if count == 1 else shared(listen(host, port), count)
    for each in sockets if count > 1 else ():
        each.listen(_BACKLOG)
    return sockets


def shared(first: socket.socket, count: int = 1) -> list[socket.socket]:
    """Return sockets of the address of another one, which is closed, that other processes may have too.

    The first one shows that nobody has it by now: for SO_REUSEPORT, another server may.
    """
    address, made = first.getsockname(), []
    first.close()
    for _ in range(count):
        each = socket.socket(first.family, first.type, first.proto)  # asyncio sets TCP_NODELAY if it is IPPROTO_TCP
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        each.bind(address)
        made.append(each)
    return made


async def serve(
    load: Load,
    listener: socket.socket,
    options: Namespace,
    ready: Callable[[Repository, str], None],
    grpc: str = "",
    probes: socket.socket | None = None,
    control: socket.socket | None = None,
    group: socket.socket | None = None,
) -> None:
    """Serve models until SIGTERM or SIGINT. When it returns, every request that came in was answered.

    It listens at once; until the models are loaded it is live and not ready.
    load: loads the bundle as it is then, in a thread; raises StagecError or Refusal, and if it is the first load, so
    does this. options: of the command, of this process. ready: called when the models are loaded, with them and the
    address for gRPC; "": there is none.
    grpc: `HOST:PORT` for gRPC; "": it is not offered. probes: answers probes and gives metrics too, in a thread of its
    own, which waits for nothing else. control: takes requests too, and it alone those that load and unload models.
    group: the end of a link to the process that started this one (`Workers`) and that says when to load something;
    the server ends when it does. None: this is the only process. Raises StagecError if it cannot listen, or gRPC's
    extension is not installed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # each connection takes a descriptor, and the usual soft limit is 1,024
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    certificates = (options.tls_cert, options.tls_key, options.tls_clients)
    tls = Certificates(*certificates) if options.tls_cert else None
    tokens = Tokens(options.token_file) if options.token_file else None
    metrics, first = Metrics(), identity(options.bundle)
    with ThreadPoolExecutor(options.threads, "stagec-call") as threads:
        free = asyncio.Semaphore(options.threads)
        delay = None if options.delay is None else options.delay / 1000

        def repository() -> Repository:
            began = time.monotonic()
            # Who calls waits for the result: another thread for the call would take as much CPU time as a small call.
            clients.cpu_client(1, asynchronous=False)
            loaded, models = load(service.tell)
            metrics.load_seconds.set(time.monotonic() - began)
            more = delay, options.queue, free, threads, metrics
            loaded.batchers = {name: Batcher(model, *more) for name, model in models.items()}
            return loaded

        sequences = Sequences(options.sequences, options.idle, metrics, options.own_ids)
        control_port = control.getsockname()[1] if control else None
        service = Service(metrics, options, repository, sequences, tokens, control_port)
        application, stops, address = Application(service), list[Stop](), ""
        config = _config(application, options)
        config.load()
        config.ssl = tls.context if tls else None
        if grpc:
            rpc = imported("stagec_grpc.rpc", "stagec serve --grpc-port").RpcServer(service, group is not None)
            address, stops = await rpc.start(grpc, tls), [rpc.stop]
        server = _Server(config, service, stops)
        application.crowded = lambda: len(server.server_state.connections) > options.connections
        application.is_alone = lambda: len(server.server_state.tasks) == 1
        if probes:
            run = functools.partial(asyncio.run, probe(service, probes, options))
            threading.Thread(target=run, name="stagec-probes", daemon=True).start()

        async def start() -> None:
            """Load the models, and watch their file from then on."""
            if group is not None:
                await _follow(group, service, lambda: ready(service.repository, address))
                return
            try:
                await service.reload()
            except BaseException:
                server.should_exit = True
                raise
            ready(service.repository, address)
            if options.watch:
                await watch(options.bundle, first, service.reload, metrics.log.error)

        keeping = asyncio.create_task(tls.keep()) if tls else None
        starting = asyncio.create_task(start())
        await server.serve([listener, *([control] if control else [])])
        if keeping:
            keeping.cancel()
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting


def _config(application: Probes, options: Namespace) -> uvicorn.Config:
    config = uvicorn.Config(
        application,
        http=_Protocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=options.keep_alive,
        backlog=_BACKLOG,
    )
    config.seconds = options.timeout  # type: ignore[attr-defined]  # of `_Protocol`
    return config


async def probe(state: Any, listener: socket.socket, options: Namespace) -> None:
    """Answer probes without an end."""
    server = uvicorn.Server(_config(Probes(state), options))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]  # others take them
    await server.serve([listener])


async def watch(
    path: str, known: tuple[int, ...] | None, reload: Callable[[], Awaitable[None]], log: Callable[[str], None]
) -> None:
    """Load the bundle's file whenever it changes, until this is cancelled, and log why it cannot be loaded.

    known: the identity of the file that is loaded.
    """
    while True:
        await asyncio.sleep(LOOK)
        now = identity(path)
        if now is None or now == known:
            continue
        known = now
        try:
            await reload()
        except (StagecError, Refusal) as error:
            log(f"the models stay as they are: {str(error).partition(chr(10))[0]}")
        except Exception:  # noqa: BLE001  # it may be gone with the next file
            log(f"the models stay as they are:\n{traceback.format_exc()}")


async def _follow(group: socket.socket, service: Service, present: Callable[[], None]) -> None:
    """Do what the process says that started this one, until it ends; then this one ends too."""

    async def asked(kind: str, value: Any) -> Any:
        match kind:
            case "prepare":
                return await service.prepare(value)
            case "end":
                service.end(taken=value)
            case "group":
                service.others = value
            case "log":
                service.metrics.log.error(value)
            case "metrics":
                return service.metrics.as_text().decode()
            case "statistics":
                return service.metrics.durations()
            case "present":
                present()
        return None

    link = Link(asked)
    await link.open(group)
    service.ask, service.agree = link.ask, functools.partial(link.ask, "agree")
    await link.run()
    os.kill(os.getpid(), signal.SIGTERM)


class _Server(uvicorn.Server):
    """Uvicorn's server with another end: after SIGTERM it takes requests for a while, and says that it ends."""

    def __init__(self, config: uvicorn.Config, service: Service, stops: Sequence[Stop]) -> None:
        super().__init__(config)
        self._service, self._stops = service, stops

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # To close a socket resets the connections that nobody has accepted yet, asyncio's server those that it has not
        # attached yet, and uvicorn those with bytes that nobody has read: so all are taken, and get a moment. Nobody
        # is answered while they are taken, or clients that connect again at once would keep us here.
        loop, make = asyncio.get_running_loop(), functools.partial(_Protocol, self.config, self.server_state, {})
        for listener in sockets or ():
            loop.remove_reader(listener)
        await asyncio.sleep(_ATTACHING)
        waiting: list[socket.socket] = []
        for listener in sockets or ():
            with contextlib.suppress(BlockingIOError):  # there are no more
                while True:
                    waiting.append(listener.accept()[0])
        for server in self.servers:
            server.close()
        attached = (loop.connect_accepted_socket(make, each, ssl=self.config.ssl) for each in waiting)
        attaching = asyncio.gather(*attached, return_exceptions=True)
        await asyncio.sleep(_LAST)
        await asyncio.gather(super().shutdown(sockets), *(stop() for stop in self._stops))
        attaching.cancel()  # a client that ends no handshake

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number, seconds in ((signal.SIGTERM, self._service.options.drain), (signal.SIGINT, 0)):
            loop.add_signal_handler(number, self._end, seconds)
        yield

    def _end(self, seconds: float) -> None:
        self._service.ending = True
        asyncio.get_running_loop().call_later(seconds, setattr, self, "should_exit", True)


class _Protocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits of headers, and of the time for them and for a client to read its answer.

    answering: the task that answers a request; it is cancelled if the client leaves.
    """

    answering: asyncio.Task[None] | None = None
    is_lost = False
    _timer: asyncio.TimerHandle
    _since: float | None = None  # since when we wait for the client; None: we do not
    _ends_with: str | None = None  # why bytes were refused: no more are read
    _beside = 0  # bytes since the last that belong to headers that are complete, or to a body
    _in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._look()

    def _look(self) -> None:
        """Close a connection whose client is slow, now or when it may be."""
        left = seconds = self.config.seconds  # type: ignore[attr-defined]
        if self._since is not None and (left := self._since + seconds - self.loop.time()) <= 0:
            if self.transport.get_write_buffer_size():  # a client that does not read its answer keeps it in memory
                self.transport.abort()
                return
            if self.timeout_keep_alive_task is None and not self._under_way:
                self.transport.close()
                return
            self._since, left = None, seconds  # a connection without a request ends as `keep_alive` says
        self._timer = self.loop.call_later(left, self._look)

    def data_received(self, data: bytes) -> None:
        if self._ends_with is not None:
            return
        if self.timeout_keep_alive_task is not None:  # a request begins
            self._since = self.loop.time()
        self._beside += len(data)
        super().data_received(data)
        if self._beside > MOST_HEADERS and self._ends_with is None:
            self.send_400_response(f"the headers are over the limit of {MOST_HEADERS:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # what follows a body in chunks changes nothing any more
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._beside, self._in_body = 0, True
        if not self.flow.write_paused:
            self._since = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._beside, self._in_body = 0, False
        super().on_message_complete()

    @property
    def _under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, as everything else: with JSON, and after the answers before."""
        self._ends_with = msg
        if self._under_way and not self.cycle.more_body:
            return
        if self._under_way:  # it will not be whole
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.pipeline:  # it waits behind another one, whose answer comes first
                self.pipeline.popleft()
                return
        body = json.dumps({"error": msg}).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode() + body)
        # With bytes that nobody has read, to close is to reset, and the client may not see the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LAST, self.transport.close)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._timer.cancel()
        self.is_lost = True
        if self.answering is not None:
            self.answering.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Where a request waits until the client has read the answers before, we wait for the client.
        self._since = None if self._under_way and not self.flow.write_paused else self.loop.time()
        if self._ends_with is not None and not self.pipeline and not self.transport.is_closing():
            self.send_400_response(self._ends_with)
