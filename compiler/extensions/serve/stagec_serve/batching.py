"""Batches: requests that wait for each other a moment, and run as one call in the bucket that they fill."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagec_serve import logs
from stagec_serve.metrics import Metrics
from stagec_serve.model import Arrays, Model
from stagec_serve.refusal import RequestError
from stagec_serve.sequences import Turn

DELAY = 0.002
"""The default seconds that a request waits for others."""
_PARTS = 4
"""Parts of one request that are in the queue at a time, so that others have their turn between them."""
_QUICK = 0.001
"""Seconds of a call that the event loop makes itself: to hand one to a thread and back takes as much CPU time."""


@dataclass(eq=False)
class _Waiting:
    """A request, or a part of one.

    since: when it came, on the loop's clock. turn: of its sequence, if it has one. priority: the least is the first.
    group: where it waits.
    queued, ended: whether it waits for a call, and whether this has ended. held: ends then. batch: the call's rows.
    """

    arrays: Arrays
    count: int
    since: float
    result: asyncio.Future[Arrays]
    turn: Turn | None
    priority: int
    group: _Group | None = None
    queued: bool = True
    batch: int = 0
    ended: bool = False
    held: contextlib.ExitStack | None = None


class _Group:
    """Requests that may run together, in their order: that of their priorities, and then that in which they came.

    model: runs them. rows: of all that wait. full: set when these are enough for one call.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.waiting: deque[_Waiting] = deque()
        self.rows = 0
        self.full = asyncio.Event()

    def add(self, item: _Waiting) -> None:
        place = len(self.waiting)
        while place and self.waiting[place - 1].priority > item.priority:
            place -= 1
        self.waiting.insert(place, item)
        self.rows += item.count
        if self.rows >= self.model.largest:
            self.full.set()

    def remove(self, item: _Waiting) -> None:
        self.waiting.remove(item)
        self.rows -= item.count

    def take(self) -> list[_Waiting]:
        """Return the first requests that one call holds; none is passed over."""
        items: list[_Waiting] = []
        most = self.model.largest
        while self.waiting and self.waiting[0].count <= most:
            item = self.waiting.popleft()
            item.queued = False
            most -= item.count
            items.append(item)
        self.rows -= sum(item.count for item in items)
        return items


class Batcher:
    """The queue of one model.

    Requests that differ in the number of rows alone run together: when they fill the largest bucket, or when the first
    has waited for `delay` seconds and a thread is free. Groups and models get free threads in turn.

    delay: seconds that a request waits for others.
    model: runs the requests that come from now on. Another one with other weights may take its place; each request
    keeps the one that it began with, and only requests of the same one run together.
    waiting: how many requests do.
    """

    def __init__(
        self, model: Model, delay: float | None, most: int, free: asyncio.Semaphore, threads: Executor, metrics: Metrics
    ) -> None:
        """delay: seconds; None: `DELAY`, and 0 for a request that comes alone. most: requests that may wait.

        free: counts the free ones of `threads`, of all models.
        """
        self.model = model
        self.delay, self._most = DELAY if delay is None else delay, most
        self._patient = delay is not None
        self._free, self._threads, self._metrics = free, threads, metrics
        self._groups: dict[Hashable, _Group] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.waiting = self._running = 0

    async def call(
        self,
        arrays: Arrays,
        begin: Callable[[], Turn] | None = None,
        model: Model | None = None,
        held: contextlib.ExitStack | None = None,
        priority: int = 0,
        is_alone: bool = False,
    ) -> Arrays:
        """Return the results of a request; one with more rows than the largest bucket runs in parts.

        begin: gives the turn of a request of a sequence; it is ended here.
        model: runs all parts; None: the present one. held: if the caller is cancelled in a call, it ends after that.
        priority: 1 is the first to run of those that wait, and 0 the last. is_alone: whether no other comes just now.
        A request whose caller is cancelled leaves the queue. Raises RequestError ("request", "busy", "failed"), and
        what `begin` raises.
        """
        model = model or self.model
        parts = model.parts(arrays)
        if self.waiting >= self._most:
            raise RequestError("busy", f"{model.name}: {self.waiting} requests wait already; try again later")
        for part in parts:
            model.fit(part)
        turn = begin() if begin else None
        is_alone &= not (self._patient or self.waiting or self._running or self._free.locked() or len(parts) > 1)
        if is_alone and model.seconds(arrays, model.count(arrays)) < _QUICK:
            item = self._item(model, arrays, turn, priority)
            await self._free.acquire()
            await self._run(model, [item], None)
            logs.note(rows=item.count, batch=item.batch)
            return item.result.result()
        results: list[Arrays] = []
        items: deque[_Waiting] = deque()
        try:
            for part in parts:
                items.append(self._item(model, part, turn, priority))
                self._enter(model, items[-1])
                if len(items) == _PARTS:
                    results.append(await items[0].result)
                    items.popleft()
            while items:
                results.append(await items[0].result)
                logs.note(rows=model.count(arrays), batch=items.popleft().batch)
        finally:
            self._abandon(items, held)
        if len(results) == 1:
            return results[0]
        return [np.concatenate(outputs) for outputs in zip(*results, strict=True)]

    def _item(self, model: Model, arrays: Arrays, turn: Turn | None, priority: int) -> _Waiting:
        loop = asyncio.get_running_loop()
        return _Waiting(arrays, model.count(arrays), loop.time(), loop.create_future(), turn, priority or 2**63)

    def _enter(self, model: Model, item: _Waiting) -> None:
        kind = model, tuple(array.shape[1:] for array in item.arrays) if model.rows else None
        group = self._groups.get(kind)
        if group is None:
            group = self._groups[kind] = _Group(model)
            self._start(self._serve(kind, group))
        group.add(item)
        item.group = group
        self.waiting += 1

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, kind: Hashable, group: _Group) -> None:
        """Run the requests of a group until there are none."""
        while group.waiting:
            # A request that comes while none runs goes at once. Later ones wait for it, and for each other.
            delay = self.delay if self._patient or self._running or len(group.waiting) > 1 else 0
            left = group.waiting[0].since + delay - asyncio.get_running_loop().time()
            if group.rows < group.model.largest and left > 0:
                group.full.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(group.full.wait(), left)
                continue
            await self._free.acquire()
            items = group.take()
            if not items:
                self._free.release()
                continue
            self.waiting -= len(items)
            is_quick = group.model.seconds(items[0].arrays, sum(item.count for item in items)) < _QUICK
            run = self._run(group.model, items, None if is_quick else self._threads)
            if is_quick:
                await run
            else:
                self._start(run)
        del self._groups[kind]

    async def _run(self, model: Model, items: Sequence[_Waiting], threads: Executor | None) -> None:
        """Run requests as one call. threads: None: here, and nothing else runs meanwhile."""
        loop = asyncio.get_running_loop()
        self._running += 1
        turn, succeeded = items[0].turn, False  # requests of sequences run alone
        try:
            began = loop.time()
            requests = [item.arrays for item in items]
            state = turn.arrays if turn else None
            rows = sum(item.count for item in items)
            for item in items:
                item.batch = rows
            if threads is None:
                bucket, results = model.run(requests, state)
            else:
                bucket, results = await loop.run_in_executor(threads, model.run, requests, state)
            waited = [began - item.since for item in items]
            self._metrics.ran(model.name, bucket, rows, loop.time() - began, waited)
            succeeded = True
        except Exception as error:  # each caller gets it
            self._metrics.log.exception("%s failed", model.name, exc_info=error)
            what = f"{model.name} failed; the server's log says why: {type(error).__name__}"
            for item in items:
                if not item.result.done():
                    item.result.set_exception(RequestError("failed", what))
            return
        finally:
            self._running -= 1
            self._free.release()
            for item in items:
                item.ended = True
                if item.held:
                    item.held.close()
            if turn:
                turn.end(succeeded)
        for item, arrays in zip(items, results, strict=True):
            if not item.result.done():
                item.result.set_result(arrays)

    def _abandon(self, items: deque[_Waiting], held: contextlib.ExitStack | None) -> None:
        """Cancel what is left of a request; if some runs, `held` ends after that, because the arrays live until then.

        It empties `items`: an error has the frame that it was raised in, and the future there has the error. Such a
        cycle keeps the arrays until a garbage collection.
        """
        for item in items:
            item.result.cancel()
            if item.queued:
                assert item.group
                item.group.remove(item)
                self.waiting -= 1
                if item.turn:
                    item.turn.end(False)
        running = [item for item in items if not item.queued and not item.ended]
        if held and running:
            running[-1].held = held.pop_all()
        items.clear()
