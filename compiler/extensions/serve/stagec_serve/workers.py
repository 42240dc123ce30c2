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
        self._handle, self._numbers = handle, itertools.count()
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
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                number, kind, value = orjson.loads(line)
                if kind not in ("answer", "refused"):
                    task = asyncio.create_task(self._answer(number, kind, value))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif (future := self._waiting.get(number)) and not future.done():
                    future.set_result((kind, value))
        self._writer.close()
        self._writer = None
        for future in self._waiting.values():
            if not future.done():
                future.set_result(("refused", ["unavailable", _GONE]))

    async def _answer(self, number: int, kind: str, value: Any) -> None:
        try:
            answer = [number, "answer", await self._handle(kind, value)]
        except (StagecError, Refusal) as error:
            answer = [number, "refused", [error.code if isinstance(error, RequestError) else "unavailable", str(error)]]
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
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._write([number, kind, value])
        try:
            answered, told = await future
        finally:
            del self._waiting[number]
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
        self._count, self._work, self.ending = count, work, False
        self._workers: dict[int, _Worker] = {}
        self._past = ""
        self._lock = asyncio.Lock()
        self._agreed: dict[str, Any] | None = None
        self._digests: Mapping[str, str] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

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

        def end(number: int) -> None:
            self.ending = True
            for listener in listeners:  # else the kernel would go on to put connections into their queues
                listener.close()
            for worker in self._workers.values():
                os.kill(worker.pid, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        ended = asyncio.gather(*(self._keep(number) for number in range(self._count)))
        first = asyncio.create_task(self._first(started))
        waited: list[asyncio.Future[Any]] = [ended, self._failed]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            end(signal.SIGINT)
        await ended
        first.cancel()
        if self._failed.done():
            self._failed.result()

    async def _first(self, started: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while len(self._workers) < self._count:
            await asyncio.sleep(_LOOK)
        try:
            await self.agree({"kind": "bundle", "weights": {}, "unloaded": []})
            while not await self._presented():
                await asyncio.sleep(_LOOK)
            await started()
        except (StagecError, Refusal) as error:
            self._fail(str(error))

    async def _presented(self) -> bool:
        """Let a worker say that all are ready; return whether it did: it may end before its answer."""
        if not self.ready:
            return False
        try:
            await self._workers[0].link.ask("present")
        except RequestError as error:
            if str(error) != _GONE:
                raise
            return False
        return True

    def _fail(self, text: str) -> None:
        if not self._failed.done() and not self.ending:
            self._failed.set_exception(mistake(text))

    async def _keep(self, number: int) -> None:
        """Start a worker, and another one whenever it ends, until the server ends."""
        tries, told = 0, ""
        while True:
            worker = self._workers[number] = await self._forked(number)
            if self.ending:  # it did not get the signal
                os.kill(worker.pid, signal.SIGTERM)
            joining = asyncio.create_task(self._join(worker, told))
            await worker.link.run()
            joining.cancel()
            del self._workers[number]
            while not (ended := os.waitpid(worker.pid, os.WNOHANG))[0]:
                await asyncio.sleep(_LOOK)
            self._past = summed([], [self._past, worker.metrics])
            tries = 0 if worker.is_ready else tries + 1
            status = os.waitstatus_to_exitcode(ended[1])
            told = f"worker {number} (process {worker.pid}) ended with status {status}; another one starts"
            self._tell()
            await asyncio.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
            if self.ending:
                return

    async def _forked(self, number: int) -> _Worker:
        ours, theirs = socket.socketpair()

        if pid := os.fork():
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
            self.log(told)
            async with self._lock:
                is_same = await worker.link.ask("prepare", self._agreed) == self._digests
                await self._end([worker], is_same)
            if not is_same:
                await self.agree(self._agreed)  # the file is another one by now
        except RequestError as error:
            self.log(f"worker {worker.number} cannot have what the others have: {error}")
            os.kill(worker.pid, signal.SIGKILL)

    async def agree(self, what: Mapping[str, Any]) -> None:
        """Let all workers take a change (`Service.prepare`), or none. Raises RequestError, and then nothing changed."""
        async with self._lock:
            everyone = what["kind"] == "bundle"  # who starts gets the rest with its bundle
            workers = [worker for worker in self._workers.values() if everyone or worker.is_ready]
            asked = (worker.link.ask("prepare", what) for worker in workers)
            prepared = await asyncio.gather(*asked, return_exceptions=True)
            errors = [each for each in prepared if isinstance(each, BaseException)]
            digests = [each for each in prepared if isinstance(each, dict)]
            if not errors and any(each != digests[0] for each in digests):
                errors = [RequestError("unavailable", "the bundle changed while it was read")]
            if not errors:
                self._agreed, self._digests = _after(self._agreed, what), digests[0]
            await self._end(workers, not errors)
            if errors:
                raise errors[0]

    async def _end(self, workers: Sequence[_Worker], taken: bool) -> None:
        """End what workers have prepared. Who ends now gets it when it is started again."""
        ended = await asyncio.gather(*(worker.link.ask("end", taken) for worker in workers), return_exceptions=True)
        for worker, answer in zip(workers, ended, strict=True):
            worker.is_ready |= taken and not isinstance(answer, BaseException)
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
        """Let a worker that is ready log an error; where there is none, write it on stderr."""
        ready = next((worker for worker in self._workers.values() if worker.is_ready), None)
        if ready:
            ready.link.tell("log", text)
        else:
            print(text, file=sys.stderr, flush=True)

    async def _asked(self, kind: str, value: Any) -> Any:
        match kind:
            case "agree":
                await self.agree(value)
            case "metrics":
                return (await self.exposition()).decode()
            case "statistics":
                return [took for each in await self._of_all(kind) if each for took in each]
            case "failed":
                if self._agreed is None:
                    self._fail(value)
                else:  # `_keep` starts it again: what it reads may be right by then
                    self.log(f"a worker cannot start: {value}")
        return None

    async def _of_all(self, kind: str) -> list[Any]:
        """Return the answers of all workers; None of one that is busy, or gone."""
        asked = (asyncio.wait_for(worker.link.ask(kind), _PATIENCE) for worker in self._workers.values())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [None if isinstance(answer, BaseException) else answer for answer in answers]

    async def exposition(self) -> bytes:
        """Return the metrics of all workers together, for Prometheus; also what workers counted that have ended."""
        workers = [*self._workers.values()]
        for worker, text in zip(workers, await self._of_all("metrics"), strict=True):
            worker.metrics = text or worker.metrics
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
