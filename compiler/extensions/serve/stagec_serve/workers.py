"""Several processes of one server: they share its port, and take a bundle or weights all together or not at all.

The first process has no models: it starts the others as forks, gives each a listening socket of the same port, starts
another one in place of one that ends, and answers probes. It has one thread, as a process that forks should, and so
lets another process write its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import orjson

from stagec.core.messages.errors import StagecError, mistake
from stagec.core.messages.refusal import Refusal
from stagec_serve.metrics import summed
from stagec_serve.refusal import RequestError

Handle = Callable[[str, Any], Awaitable[Any]]
"""Answers a question: its name, and what it is about."""
_MOST = 2**26
_GONE = "a worker ended meanwhile"
_PATIENCE = 1.0
"""Seconds that a busy worker has to give its metrics; after that, what it said before counts."""
_PAUSES = (0.0, 0.2, 1.0, 5.0)
"""Seconds before a worker is started again that has ended before it was ready, the first time and later."""
_LOOK = 0.02


class Link:
    """Questions and answers between two processes, each a line of JSON."""

    def __init__(self, handle: Handle) -> None:
        """handle: answers the questions of the other end; a RequestError of it is raised there."""
        self._handle = handle
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, connection: socket.socket) -> None:
        """Use one end of a connection, which `connection` is from now on."""
        self.connection = connection
        self._reader, self._writer = await asyncio.open_connection(sock=connection, limit=_MOST)

    async def run(self) -> None:
        """Answer until the other end is closed."""
        assert self._writer is not None
        try:
            while line := await self._reader.readline():
                number, kind, value = orjson.loads(line)
                if kind in ("answer", "refused"):
                    if (future := self._waiting.pop(number, None)) and not future.done():
                        future.set_result((kind, value))
                    continue
                task = asyncio.create_task(self._answer(number, kind, value))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except ConnectionError:
            pass
        finally:
            writer, self._writer = self._writer, None
            writer.close()
            for future in self._waiting.values():
                future.cancel()

    async def _answer(self, number: int, kind: str, value: Any) -> None:
        try:
            answer = [number, "answer", await self._handle(kind, value)]
        except RequestError as error:
            answer = [number, "refused", [error.code, str(error)]]
        except (StagecError, Refusal) as error:
            answer = [number, "refused", ["unavailable", str(error)]]
        except Exception:  # noqa: BLE001  # the other end waits
            answer = [number, "refused", ["failed", traceback.format_exc()]]
        self._write(answer)

    def tell(self, kind: str, value: object) -> None:
        """Ask, and do not wait for the answer."""
        self._write([next(self._numbers), kind, value])

    def _write(self, value: object) -> None:
        if self._writer is not None:
            self._writer.write(orjson.dumps(value) + b"\n")

    async def ask(self, kind: str, value: object = None) -> Any:
        """Return the other end's answer. Raises its RequestError, and one ("unavailable") if it ends before."""
        if self._writer is None:
            raise RequestError("unavailable", _GONE)
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._write([number, kind, value])
        try:
            answered, told = await future
        except asyncio.CancelledError:
            if future.cancelled() and self._writer is None:
                raise RequestError("unavailable", _GONE) from None
            raise
        finally:
            self._waiting.pop(number, None)
        if answered == "refused":
            raise RequestError(*told)
        return told


class _Worker:
    """A process. number: its place, from 0. is_ready: whether it offers what all do. metrics: the last it said."""

    def __init__(self, number: int, pid: int, link: Link) -> None:
        self.number, self.pid, self.link = number, pid, link
        self.is_ready, self.metrics = False, ""


class Workers:
    """The processes of a server, as probes see them.

    ready, loading, ending: as of `Service`; live: always.
    """

    def __init__(self, count: int, work: Callable[[int, socket.socket], None]) -> None:
        """work: is a worker: its number, and its end of a link; it returns when the worker ends."""
        self._count, self._work = count, work
        self._workers: dict[int, _Worker] = {}
        self._past = ""
        self._lock = asyncio.Lock()
        self._agreed: dict[str, Any] | None = None
        self._digests: Mapping[str, str] = {}
        self._failed: asyncio.Future[None] | None = None
        self.ending = False

    @property
    def loading(self) -> str:
        """How many workers are ready; "" if all are."""
        ready = sum(worker.is_ready for worker in self._workers.values())
        return "" if ready == self._count else f"{ready} of {self._count} workers are ready"

    @property
    def ready(self) -> bool:
        """Whether all workers answer requests, now and for a while."""
        return not self.loading and not self.ending

    async def run(self, listeners: Sequence[socket.socket], started: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run workers until SIGTERM or SIGINT, and until they have ended.

        listeners: those of the workers, which are closed here at the end, as theirs are. started: is run when all are
        ready for the first time, and until the end. Raises StagecError if they cannot start.
        """
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()

        def end(number: int) -> None:
            self.ending = True
            for listener in listeners:  # else the kernel would go on to put connections into their queues
                listener.close()
            for worker in self._workers.values():
                os.kill(worker.pid, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end, number)
        kept = [asyncio.create_task(self._keep(number)) for number in range(self._count)]
        first = asyncio.create_task(self._first(started))
        try:
            ended = asyncio.gather(*kept)
            waited: list[asyncio.Future[Any]] = [ended, self._failed]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                end(signal.SIGINT)
                await ended
        finally:
            first.cancel()
        if self._failed.done():
            self._failed.result()

    async def _first(self, started: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while len(self._workers) < self._count:
            await asyncio.sleep(_LOOK)
        try:
            await self.agree({"kind": "bundle", "weights": {}, "unloaded": []})
            await self._workers[0].link.ask("present")
            await started()
        except (StagecError, Refusal) as error:
            self._fail(str(error))

    def _fail(self, text: str) -> None:
        assert self._failed is not None
        if not self._failed.done() and not self.ending:
            self._failed.set_exception(mistake(text))

    async def _keep(self, number: int) -> None:
        """Start a worker, and another one whenever it ends, until the server ends."""
        tries, told = 0, ""
        while True:
            worker = await self._forked(number)
            self._workers[number] = worker
            if self.ending:  # it did not get the signal
                os.kill(worker.pid, signal.SIGTERM)
            joining = asyncio.create_task(self._join(worker, told))
            await worker.link.run()
            joining.cancel()
            del self._workers[number]
            status = await _ended(worker.pid)
            self._past = summed([], [self._past, worker.metrics])
            tries = 0 if worker.is_ready else tries + 1
            told = f"worker {number} (process {worker.pid}) ended with status {status}; another one starts"
            self._tell()
            await asyncio.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
            if self.ending:
                return

    async def _forked(self, number: int) -> _Worker:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            worker = _Worker(number, pid, Link(self._asked))
            await worker.link.open(ours)
            return worker
        status = 1
        try:  # this is the worker: it forgets the loop, and what the loop waits for
            asyncio._set_running_loop(None)
            signal.set_wakeup_fd(-1)
            for handled in (signal.SIGTERM, signal.SIGINT):
                signal.signal(handled, signal.SIG_DFL)
            ours.close()
            for other in self._workers.values():  # each must see that the first process ends
                os.close(other.link.connection.fileno())
            self._work(number, theirs)
            status = 0
        except (StagecError, Refusal) as error:
            theirs.setblocking(True)
            with contextlib.suppress(OSError):
                theirs.sendall(orjson.dumps([-1, "failed", str(error)]) + b"\n")
        except BaseException:  # noqa: BLE001  # nothing is above it
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                logging.shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    async def _join(self, worker: _Worker, told: str) -> None:
        """Let a worker that was started later have what the others have."""
        if self._agreed is None:
            return
        try:
            worker.link.tell("log", told)
            async with self._lock:
                digests = await worker.link.ask("prepare", self._agreed)
                if digests == self._digests:
                    await self._take([worker])
                    return
                await worker.link.ask("drop")
            await self.agree(self._agreed)  # the file is another one by now
        except RequestError as error:
            self.log(f"worker {worker.number} cannot have what the others have: {error}")
            os.kill(worker.pid, signal.SIGKILL)

    async def agree(self, what: Mapping[str, Any]) -> None:
        """Let all workers take a change (`Service.prepare`), or none. Raises RequestError, and then nothing changed."""
        async with self._lock:
            everyone = what["kind"] == "bundle"  # who starts gets the rest with its bundle
            workers = [worker for worker in self._workers.values() if everyone or worker.is_ready]
            prepared = await asyncio.gather(
                *(worker.link.ask("prepare", what) for worker in workers), return_exceptions=True
            )
            errors = [each for each in prepared if isinstance(each, BaseException)]
            digests = [each for each in prepared if isinstance(each, dict)]
            if not errors and any(each != digests[0] for each in digests):
                errors = [RequestError("unavailable", "the bundle changed while it was read")]
            if errors:
                dropped = (worker.link.ask("drop") for worker in workers)
                await asyncio.gather(*dropped, return_exceptions=True)
                raise errors[0]
            self._agreed, self._digests = _after(self._agreed, what), digests[0]
            await self._take(workers)

    async def _take(self, workers: Sequence[_Worker]) -> None:
        # Who ends now gets it when it is started again.
        taken = await asyncio.gather(*(worker.link.ask("take") for worker in workers), return_exceptions=True)
        for worker, answer in zip(workers, taken, strict=True):
            worker.is_ready |= not isinstance(answer, BaseException)
        self._tell()

    async def reload(self) -> None:
        """Load the bundle's file again, with its own weights. Raises as `agree`."""
        assert self._agreed is not None
        await self.agree({"kind": "bundle", "weights": {}, "unloaded": self._agreed["unloaded"]})

    def _tell(self) -> None:
        """Tell all workers how many are ready: each answers probes too."""
        for worker in self._workers.values():
            worker.link.tell("group", self.loading)

    def log(self, text: str) -> None:
        """Let a worker log an error."""
        for worker in [*self._workers.values()][:1]:
            worker.link.tell("log", text)

    async def _asked(self, kind: str, value: Any) -> Any:
        match kind:
            case "agree":
                return await self.agree(value)
            case "metrics":
                return (await self.exposition()).decode()
            case "statistics":
                return _added(await self._of_all("statistics", value))
            case "failed":
                self._fail(value)
        return None

    async def _of_all(self, kind: str, value: Any) -> list[Any]:
        asked = (asyncio.wait_for(worker.link.ask(kind, value), _PATIENCE) for worker in self._workers.values())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def exposition(self) -> bytes:
        """Return the metrics of all workers together, for Prometheus; also what workers counted that have ended."""

        async def refresh(worker: _Worker) -> None:
            worker.metrics = await asyncio.wait_for(worker.link.ask("metrics"), _PATIENCE)

        workers = [*self._workers.values()]
        await asyncio.gather(*map(refresh, workers), return_exceptions=True)
        return summed([worker.metrics for worker in workers], [self._past]).encode()


def _after(agreed: Mapping[str, Any] | None, what: Mapping[str, Any]) -> dict[str, Any]:
    """Return the change to a bundle that does as much as those before and this one."""
    if what["kind"] == "bundle":
        return dict(what)
    assert agreed is not None
    after = {**agreed, "weights": dict(agreed["weights"]), "unloaded": what.get("unloaded", agreed["unloaded"])}
    if what["kind"] == "weights":
        after["weights"][what["name"]] = what["parameters"]
    return after


def _added(values: Sequence[Any]) -> Any:
    """Return the sum of statistics: of numbers in the same place; calls by their rows are put together."""
    first = values[0]
    if isinstance(first, dict):
        joined = {key: [value[key] for value in values] for key in first}
        largest = "last_inference", "batch_size"
        return {key: max(each) if key in largest else _added(each) for key, each in joined.items()}
    if isinstance(first, list):
        by_key: dict[Any, list[Any]] = {}
        for row in itertools.chain(*values):
            by_key.setdefault(row.get("batch_size", row.get("name")), []).append(row)
        return [_added(rows) for _, rows in sorted(by_key.items(), key=lambda item: str(item[0]).zfill(9))]
    return first if isinstance(first, str) else sum(values)


async def _ended(pid: int) -> int:
    """Return the exit status of a process that ends; the number of a signal is negative."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        await asyncio.sleep(_LOOK)
