"""A server process: a bundle, its models, a socket, and a shutdown that loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import errno
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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stagec.core.messages.errors import StagecError, mistake
from stagec.core.messages.refusal import Refusal
from stagec.loader.bundle import Bundle
from stagec.loader.selection import Policy
from stagec_serve.batching import Batcher
from stagec_serve.metrics import Metrics
from stagec_serve.model import Model
from stagec_serve.rest import MOST_HEADERS, Application, Probes, State
from stagec_serve.sequences import IDLE, Sequences
from stagec_serve.service import Limits, Repository, Service
from stagec_serve.swapping import Swapping
from stagec_serve.trust import LOOK, Certificates, Tokens, identity
from stagec_serve.workers import Link

if TYPE_CHECKING:
    from stagec_serve.rpc import RpcServer

Tell = Callable[[str], None]
"""Takes how far loading is, for people."""
_CGROUPS = Path("/sys/fs/cgroup")
_ATTACHING = 0.05
"""Seconds in which asyncio makes connections of what it has accepted."""
_LAST = 0.3
"""Seconds between the last connection and the end of those that have no request."""
_BACKLOG = 2048
"""Connections that wait to be accepted, at most."""


@dataclass(frozen=True)
class Options:
    """How a server runs.

    delay: seconds that a request waits for others; None: as `Batcher` says. queue: requests of a model that may wait.
    threads: calls at a time; 0: as many as there are cores.
    connections: at a time; of gRPC, calls at a time.
    drain: seconds after SIGTERM while the server still takes new requests.
    tls: None: there is none. tokens: of which a request needs one; None: it needs none.
    control: whether clients may load and unload models. watch: the bundle's file, to load it again when it changes.
    keep_alive: seconds without a request after which a connection ends.
    sequences: the most at a time, of each state. idle: seconds before one ends, if the manifest does not say.
    own_ids: whether the server makes the ids of all sequences.
    """

    delay: float | None = None
    queue: int = 1000
    threads: int = 0
    connections: int = 1000
    drain: float = 5
    tls: Certificates | None = None
    tokens: Tokens | None = None
    control: bool = False
    watch: str = ""
    keep_alive: float = 75
    sequences: int = 64
    idle: float = IDLE
    own_ids: bool = False
    limits: Limits = field(default_factory=Limits)


class Loaded(NamedTuple):
    """A bundle's models.

    models: by name. left_out: why each of the other functions is not offered. swapping: gives models other weights.
    close: unloads the bundle.
    """

    models: Mapping[str, Model]
    left_out: Mapping[str, str]
    swapping: Swapping
    close: Callable[[], None]


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


def cores() -> int:
    """Return how many calls may run at a time: the cores of this process, or fewer if its cgroup may use less time.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max), and cpu.cfs_quota_us of version 1.
    """
    count = len(os.sched_getaffinity(0))
    for quota, period in _quotas():
        count = min(count, max(1, math.ceil(quota / period)))
    return count


def _quotas() -> Iterator[tuple[int, int]]:
    """Yield microseconds of CPU time and of the time in which they may be used, of this cgroup and those above it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines():
            _, controllers, place = line.split(":", 2)
            root = _CGROUPS if not controllers else _CGROUPS / "cpu"
            if controllers and "cpu" not in controllers.split(","):
                continue
            folder = root / place.lstrip("/")
            while folder.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError):
                    if controllers:
                        words = [(folder / f"cpu.cfs_{name}_us").read_text("utf-8") for name in ("quota", "period")]
                    else:
                        words = (folder / "cpu.max").read_text("utf-8").split()
                    quota, period = map(int, words)  # "max" is not a number, and -1 means no limit
                    if quota > 0:
                        yield quota, period
                folder = folder.parent


def _other_state(model: Model, others: Iterable[Model]) -> str:
    """Return why a model cannot share its states with others; "" if it can."""
    for other in others:
        for name in model.states.keys() & other.states.keys():
            if model.avals(name) != other.avals(name):
                mine, theirs = (", ".join(map(str, which.avals(name))) for which in (model, other))
                return f"its state {name} is {mine}, and that of {other.name} is {theirs}"
    return ""


def listen(host: str, port: int, path: str = "") -> socket.socket:
    """Return a socket of this address; nobody can connect before `serve`. Raises StagecError.

    path: of a Unix socket, instead of host and port. One that a server has left behind is removed.
    """
    if path:
        return _listen_at(path)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        write = "give another --host or --port"
        raise mistake(f"{host}:{port}: cannot listen there: {error.strerror}", write) from None
    return listener


def listeners(count: int, host: str, port: int, path: str = "") -> list[socket.socket]:
    """Return sockets of one address for several processes, as `listen` does. Of a Unix socket they are the same one.

    The kernel gives each connection to one of them, by the client's address. They listen at once: a connection waits
    for a process that starts again.
    """
    first = listen(host, port, path)
    if path or count == 1:
        return [first] * count
    sockets = shared(first, count)
    for each in sockets:
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


def _listen_at(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, contextlib.suppress(FileNotFoundError):
            if other.connect_ex(path) == errno.ECONNREFUSED and Path(path).is_socket():
                Path(path).unlink()
        listener.bind(path)
    except OSError as error:
        raise mistake(f"{path}: cannot listen there: {error.strerror or error}", "give another --socket") from None
    return listener


async def serve(
    load: Callable[[Tell], Loaded],
    listener: socket.socket,
    options: Options,
    ready: Callable[[Repository, str], None],
    grpc_address: str = "",
    probes: socket.socket | None = None,
    control: socket.socket | None = None,
    group: socket.socket | None = None,
) -> None:
    """Serve models until SIGTERM or SIGINT. When it returns, every request that came in was answered.

    It listens at once; until the models are loaded it is live and not ready.
    load: loads the bundle as it is then, in a thread, and calls its argument with how far it is; raises StagecError or
    Refusal, and if it is the first load, so does this.
    ready: called when the models are loaded, with them and the address for gRPC; "": there is none.
    grpc_address: `HOST:PORT` for gRPC; "": it is not offered. Raises StagecError if nobody can listen there.
    probes: answers probes and gives metrics too, in a thread of its own, which waits for nothing else; None: none does.
    control: takes requests too, and it alone those that load and unload models; None: `listener` takes these.
    group: the end of a link to the process that started this one (`Workers`) and that says when to load something;
    the server ends when it does. None: this is the only process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # each connection takes a descriptor, and the usual soft limit is 1,024
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    metrics, first = Metrics(), identity(options.watch)
    count = options.threads or cores()
    with ThreadPoolExecutor(count, "stagec-call") as threads:
        free = asyncio.Semaphore(count)

        def repository() -> Repository:
            began = time.monotonic()
            loaded = load(service.tell)
            metrics.load_seconds.set(time.monotonic() - began)
            batchers = {
                name: Batcher(model, options.delay, options.queue, free, threads, metrics)
                for name, model in loaded.models.items()
            }
            return Repository(batchers, loaded.left_out, loaded.swapping, loaded.close)

        sequences = Sequences(options.sequences, options.idle, metrics, options.own_ids)
        service = Service(metrics, options.limits, repository, options.control, sequences, options.tokens)
        service.control_port = control.getsockname()[1] if control else None
        application = Application(service)
        config = _config(application, options)
        config.load()
        config.ssl = options.tls.context if options.tls else None
        rpc = None
        if grpc_address:
            from stagec_serve.rpc import RpcServer  # it takes a while, and not everybody wants it

            rpc = RpcServer(service, options.connections, group is not None)
            grpc_address = await rpc.start(grpc_address, options.tls)
        server = _Server(config, service, options.drain, rpc)
        application.crowded = lambda: len(server.server_state.connections) > options.connections
        if probes is not None:
            run = functools.partial(asyncio.run, probe(service, probes, options))
            threading.Thread(target=run, name="stagec-probes", daemon=True).start()

        async def start() -> None:
            """Load the models, and watch their file from then on."""
            if group is not None:
                await _follow(group, service, lambda: ready(service.repository, grpc_address))
                return
            try:
                await service.reload()
            except BaseException:
                server.should_exit = True
                raise
            ready(service.repository, grpc_address)
            if options.watch:
                await watch(options.watch, first, service.reload, service.metrics.log.error)

        keeping = asyncio.create_task(options.tls.keep()) if options.tls else None
        starting = asyncio.create_task(start())
        await server.serve([listener, *([control] if control else [])])
        if keeping:
            keeping.cancel()
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting


def _config(application: Probes, options: Options) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=_protocol(options.limits.seconds),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=options.keep_alive,  # type: ignore[arg-type]  # a number of seconds, which may be a fraction
        backlog=_BACKLOG,
    )


async def probe(state: State, listener: socket.socket, options: Options) -> None:
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
            case "take":
                service.take()
            case "drop":
                service.drop()
            case "group":
                service.others = value
            case "log":
                service.metrics.log.error(value)
            case "metrics":
                return service.metrics.as_text().decode()
            case "statistics":
                return service.metrics.told(value)
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

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        drain: float,
        rpc: RpcServer | None,
    ) -> None:
        super().__init__(config)
        self._service, self._drain, self._rpc = service, drain, rpc

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # To close a socket resets the connections that nobody has accepted yet, asyncio's server those that it has not
        # attached yet, and uvicorn those with bytes that nobody has read: so all are taken, and get a moment.
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            loop.remove_reader(listener)
            await asyncio.sleep(_ATTACHING)
            with contextlib.suppress(BlockingIOError):  # there are no more
                while True:
                    connection, _ = listener.accept()
                    await loop.connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl)
        for server in self.servers:
            server.close()
        await asyncio.sleep(_LAST)
        stops = [self._rpc.stop()] if self._rpc else []
        await asyncio.gather(super().shutdown(sockets), *stops)

    def _protocol(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        return protocol(config=self.config, server_state=self.server_state, app_state={})  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number, seconds in ((signal.SIGTERM, self._drain), (signal.SIGINT, 0)):
            loop.add_signal_handler(number, self._end, seconds)
        yield

    def _end(self, seconds: float) -> None:
        self._service.ending = True
        asyncio.get_running_loop().call_later(seconds, setattr, self, "should_exit", True)


def _protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol that waits no longer than that for headers, and for a client to read its answer.

    uvicorn itself waits for headers forever, and takes any number of them.
    """

    class Protocol(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _ends_with: str | None = None  # why bytes were refused: no more are read
        _beside = 0  # bytes since the last that belong to headers that are complete, or to a body
        _in_body = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._limit()

        def data_received(self, data: bytes) -> None:
            if self._ends_with is not None:
                return
            if self.timeout_keep_alive_task is not None and self._timer is not None:  # a request begins
                self._timer.cancel()
                self._timer = None
            self._beside += len(data)
            super().data_received(data)
            if self._beside > MOST_HEADERS and self._ends_with is None:
                self.send_400_response(f"the headers are over the limit of {MOST_HEADERS:,} bytes")
            self._limit()

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._in_body:  # what follows a body in chunks changes nothing any more
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._beside, self._in_body = 0, True
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._beside = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._beside, self._in_body = 0, False
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            """Refuse bytes that are not HTTP, as everything else: with JSON, and after the answers before."""
            self._ends_with = msg
            if self._under_way and not self.cycle.more_body:
                return
            if self._under_way:  # it will not be whole
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            body = json.dumps({"error": msg}).encode()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode() + body)
            # With bytes that nobody has read, to close is to reset, and the client may not see the answer.
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(_LAST, self.transport.close)

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            if self._timer is not None:
                self._timer.cancel()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._ends_with is not None and not self.pipeline and not self.transport.is_closing():
                self.send_400_response(self._ends_with)
            self._limit()

        @property
        def _under_way(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _limit(self) -> None:
            """Start the limit if no request is under way, and end it if one is."""
            if self._under_way and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            elif not self._under_way and self._timer is None:
                self._timer = self.loop.call_later(seconds, self._close)

        def _close(self) -> None:
            self._timer = None
            if self.transport.get_write_buffer_size():  # a client that does not read its answer keeps it in memory
                self.transport.abort()
            elif self.timeout_keep_alive_task is None and not self._under_way:
                self.transport.close()  # a connection without a request ends as `keep_alive` says

    return Protocol
