"""The queue of a model: which requests run as one call, and how a request leaves it."""

import asyncio
import gc
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagec
from stagec_serve import batching
from stagec_serve.batching import Batcher
from stagec_serve.metrics import Metrics
from stagec_serve.model import Model
from stagec_serve.refusal import RequestError


@pytest.fixture(autouse=True, params=[0, 60], ids=["in threads", "in the loop"])
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Where calls run: what holds for those in threads holds for quick ones in the loop."""
    monkeypatch.setattr(batching, "_QUICK", request.param)
    return float(request.param)


def rows(count: int, seed: int = 0) -> list[Any]:
    return [np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)]


def run(
    model: Model,
    work: Callable[[Batcher], Awaitable[object]],
    delay: float | None = 0.05,
    most: int = 100,
    threads: int = 1,
) -> list[tuple[str, str]]:
    """Run what uses a queue; return the bucket of each call."""
    metrics = Metrics()
    with ThreadPoolExecutor(threads) as pool:

        async def with_batcher() -> None:
            batcher = Batcher(model, delay, most, asyncio.Semaphore(threads), pool, metrics)
            await work(batcher)
            assert metrics.waiting.labels(model.name)._value.get() == 0
            await asyncio.sleep(0)
            assert not batcher._groups

        asyncio.run(with_batcher())
    lines = [line for line in metrics.as_text().decode().splitlines() if line.startswith("stagec_calls_total{")]
    return [(line.split('"')[1], line.split()[-1]) for line in lines]


def test_requests_that_fill_a_bucket_run_at_once(models: dict[str, Model], bundle: stagec.Bundle) -> None:
    async def work(batcher: Batcher) -> None:
        requests = [rows(2, seed) for seed in range(32)]
        results = await asyncio.wait_for(asyncio.gather(*map(batcher.call, requests)), 5)
        for (x,), (_, logits) in zip(requests, results, strict=True):
            padded = np.zeros((32, 16), np.float32)
            padded[:2] = x
            assert logits.tobytes() == bundle["predict"](padded)["logits"][:2].tobytes()

    assert run(models["predict"], work, delay=60) == [("batch = 32", "2.0")]


def test_a_request_that_comes_alone_waits_for_nobody(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, quick: float
) -> None:
    monkeypatch.setattr(batching, "DELAY", 60)

    async def alone(batcher: Batcher) -> None:
        for _ in range(2):
            await asyncio.wait_for(batcher.call(rows(3)), 5)

    assert run(models["predict"], alone, delay=None) == [("batch = 8", "2.0")]
    monkeypatch.setattr(batching, "DELAY", 0.05)

    async def together(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.call(rows(8)))
        while not quick and (batcher.waiting or not batcher._running):
            await asyncio.sleep(0)
        # While it runs, these wait for each other; if it is quick, all three do.
        await asyncio.gather(first, batcher.call(rows(3)), batcher.call(rows(4)))

    expected = {"batch = 32": "1.0"} if quick else {"batch = 8": "2.0"}
    assert dict(run(models["predict"], together, delay=None, threads=2)) == expected


def test_a_request_waits_for_others_and_no_longer(models: dict[str, Model]) -> None:
    async def work(batcher: Batcher) -> None:
        began = time.monotonic()
        await asyncio.gather(batcher.call(rows(3)), batcher.call(rows(4)))
        assert 0.05 <= time.monotonic() - began < 5

    assert run(models["predict"], work) == [("batch = 8", "1.0")]


def test_nobody_is_passed_over(models: dict[str, Model]) -> None:
    """A request that does not fit runs in the next call, and before all that came later."""

    async def work(batcher: Batcher) -> None:
        order: list[int] = []

        async def call(number: int, count: int) -> None:
            await batcher.call(rows(count))
            order.append(number)

        await asyncio.gather(*(call(number, count) for number, count in enumerate((30, 20, 1, 15))))
        assert order == [0, 1, 2, 3]

    assert run(models["predict"], work) == [("batch = 32", "3.0")]


def test_priorities(models: dict[str, Model]) -> None:
    """Of those that wait, 1 runs before 2, and these before the others; equal ones in their order."""

    async def work(batcher: Batcher) -> None:
        order: list[int] = []

        async def call(priority: int) -> None:
            await batcher.call(rows(32), priority=priority)
            order.append(priority)

        await asyncio.gather(*map(call, (0, 7, 1, 7, 0, 1)))
        assert order == [1, 1, 7, 7, 0, 0]

    assert run(models["predict"], work) == [("batch = 32", "6.0")]


def test_requests_of_other_sizes_run_apart(models: dict[str, Model]) -> None:
    async def work(batcher: Batcher) -> None:
        given = [np.full((1, size), size, np.float32) for size in (2, 2, 3, 8, 2)]
        results = await asyncio.gather(*(batcher.call([x]) for x in given))
        for x, (y,) in zip(given, results, strict=True):
            np.testing.assert_array_equal(y, x * 2 + 1)

    calls = dict(run(models["scaled"], work))
    assert calls == {"batch = 4, length = 2": "1.0", "batch = 1, length = 8": "2.0"}


def test_what_is_not_gathered_runs_one_by_one(models: dict[str, Model]) -> None:
    async def work(batcher: Batcher) -> None:
        x = np.ones((3, 3), np.float32)
        for (y,) in await asyncio.gather(*(batcher.call([x]) for _ in range(5))):
            np.testing.assert_array_equal(y, np.cumsum(x, 0))

    assert run(models["running"], work, delay=60, threads=2) == [("batch = 8", "5.0")]


def test_a_large_request_is_split(models: dict[str, Model]) -> None:
    async def work(batcher: Batcher) -> None:
        x = rows(70)
        _, logits = await batcher.call(x)
        parts = [batcher.model.run([part])[1][0][1] for part in batcher.model.parts(x)]
        np.testing.assert_array_equal(logits, np.concatenate(parts))

    assert dict(run(models["predict"], work)) == {"batch = 32": "2.0", "batch = 8": "1.0"}


def test_a_large_request_lets_others_in(models: dict[str, Model]) -> None:
    async def work(batcher: Batcher) -> None:
        large = asyncio.create_task(batcher.call(rows(32 * 100)))
        await asyncio.sleep(0)
        assert batcher.waiting == 4
        await batcher.call(rows(1))
        assert not large.done()
        _, logits = await large
        assert logits.shape == (3200, 5)

    assert sum(float(count) for _, count in run(models["predict"], work, delay=0)) == 101


def test_the_queue_has_an_end(models: dict[str, Model]) -> None:
    async def work(batcher: Batcher) -> None:
        waiting = [asyncio.create_task(batcher.call(rows(1))) for _ in range(3)]
        await asyncio.sleep(0)
        for count in (1, 33):
            with pytest.raises(RequestError, match="predict: 3 requests wait already; try again later") as error:
                await batcher.call(rows(count))
            assert error.value.code == "busy"
        await asyncio.gather(*waiting)
        await batcher.call(rows(1))

    assert dict(run(models["predict"], work, most=3)) == {"batch = 8": "1.0", "batch = 1": "1.0"}


def test_a_cancelled_request_leaves_the_queue(models: dict[str, Model]) -> None:
    async def work(batcher: Batcher) -> None:
        tasks = [asyncio.create_task(batcher.call(rows(count))) for count in (1, 20, 10)]
        await asyncio.sleep(0)
        assert batcher.waiting == 3
        tasks[1].cancel()
        tasks[2].cancel()
        await asyncio.wait(tasks[1:])
        assert (batcher.waiting, tasks[0].done()) == (1, False)
        await tasks[0]

    assert dict(run(models["predict"], work, delay=0.5)) == {"batch = 1": "1.0"}


def test_sizes_are_refused_before_the_queue(models: dict[str, Model]) -> None:
    async def work(batcher: Batcher) -> None:
        with pytest.raises(RequestError, match="no bucket has these sizes"):
            await batcher.call([np.zeros((1, 9), np.float32)])

    assert run(models["scaled"], work) == []


def test_a_call_that_fails_is_an_error_of_each_request(served: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = stagec.load(served)
    model = Model(bundle["predict"], "1", "batch")
    bundle.close()

    async def work(batcher: Batcher) -> None:
        results = await asyncio.gather(batcher.call(rows(1)), batcher.call(rows(2)), return_exceptions=True)
        assert [str(error) for error in results] == ["predict failed; the server's log says why: CallError"] * 2
        assert "predict: the bundle was closed" in caplog.text

    assert run(model, work) == []


@pytest.mark.parametrize("count", [1, 200])
def test_a_call_that_fails_keeps_no_arrays(served: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error has frames, and these have what was in them: no collector has to find the arrays of a request."""
    bundle = stagec.load(served)
    model = Model(bundle["predict"], "1", "batch")
    bundle.close()
    monkeypatch.setattr(Metrics.log, "disabled", True)  # pytest keeps each record, and its error

    async def work(batcher: Batcher) -> None:
        given = rows(count)
        kept = weakref.ref(given[0])
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(RequestError, match="predict failed"):
                await batcher.call(given)
            del given
            for _ in range(1000):  # the other parts leave the queue, and the pool's thread its call
                await asyncio.sleep(0.01)
                if kept() is None:
                    break
            assert kept() is None
        finally:
            gc.enable()

    assert run(model, work) == []
