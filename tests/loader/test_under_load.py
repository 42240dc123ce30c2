"""Load: many threads, many loads; `STAGEC_LOAD_CALLS` says how many calls each thread makes.

Modules: `loader/bundle.py`, `loader/function.py`.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

import stagec
from tests.bundles import only

THREADS = 8
CALLS = int(os.environ.get("STAGEC_LOAD_CALLS", "2000"))
LOADS = 200


def test_calls_from_many_threads(zoo: Path) -> None:
    bundle, start = stagec.load(zoo), Barrier(THREADS)

    def work(number: int) -> int:
        rng = np.random.default_rng(number)
        inputs = [rng.random(8).astype(np.float32) for _ in range(4)]  # `loop` does not end below -2
        start.wait()
        # The first call loads the executable, in all threads at once.
        expected = [bundle["loop"](x)[1].tobytes() for x in inputs]
        wrong = 0
        for call in range(CALLS):
            wrong += bundle["loop"](inputs[call % 4])[1].tobytes() != expected[call % 4]
        again = stagec.load(zoo)["loop"]
        return wrong + sum(again(x)[1].tobytes() != e for x, e in zip(inputs, expected, strict=True))

    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(work, range(THREADS))) == 0


def test_memory_is_flat_over_many_loads(zoo: Path, tmp_path: Path) -> None:
    path, x = only(zoo, tmp_path / "loop.aot", "loop"), np.ones(8, np.float32)

    def load() -> None:
        with stagec.load(path) as bundle:
            bundle["loop"](x)

    for _ in range(LOADS // 4):  # allocators keep what they once had
        load()
    before = resident()
    for _ in range(LOADS):
        load()
    # The file has more than 30 KiB, and so has the machine code.
    assert resident() - before < LOADS * 10 * 1024


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_closed_bundle(zoo: Path) -> None:
    bundle = stagec.load(zoo)
    x = stagec.device_put(np.ones(8, np.float32))
    loop = bundle["loop"]
    _, result = loop(x)
    bundle.close()
    bundle.close()
    assert result.numpy().shape == (8,)
    for function in (loop, bundle["update"]):
        with pytest.raises(stagec.CallError) as refusal:
            function(x) if function is loop else function({"x": np.zeros(4, "f4"), "y": [np.float32(0)]}, np.float32(1))
        assert (refusal.value.code, str(refusal.value)) == ("closed", f"{function.name}: the bundle was closed")


def test_several_bundles_at_once(zoo: Path) -> None:
    first, second = stagec.load(zoo), stagec.load(zoo)
    x = np.ones(8, np.float32)
    expected = first["loop"](x)[1]
    first.close()
    np.testing.assert_array_equal(second["loop"](x)[1], expected)
