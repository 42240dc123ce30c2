"""Load: many threads, many loads; `STAGEC_LOAD_CALLS` says how many calls each thread makes.

Modules: `loader/bundle.py`, `loader/function.py`, `loader/loaded.py`, `loader/once.py`.
"""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, get_ident
from typing import Any

import numpy as np
import pytest

import stagec
from stagec.pjrt.executable import Executable
from tests.bundles import edited_index, only, without_executables

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


def test_a_bundle_is_no_circle(zoo: Path) -> None:
    """Its file and what it has read go at once, and not when Python looks for garbage."""
    gc.collect()
    gc.disable()
    try:
        with stagec.load(zoo) as bundle:
            bundle["loop"](np.ones(8, np.float32))
        del bundle
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_closed_bundle_holds_no_file(zoo: Path, tmp_path: Path) -> None:
    """Its weights were mapped, and passed to XLA as they are: somebody may unmount what it came from."""
    path = only(zoo, tmp_path / "mapped.aot", "from_file")
    with stagec.load(path) as bundle:
        bundle["from_file"](np.ones(2, np.float32))
        assert str(path) in Path("/proc/self/maps").read_text()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert str(path) not in map(os.path.realpath, Path("/proc/self/fd").iterdir())


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
    for name, use in (("loop", lambda: loop(x)), ("update", lambda: bundle["update"])):
        with pytest.raises(stagec.CallError) as refusal:
            use()
        assert (refusal.value.code, str(refusal.value)) == ("closed", f"{name}: the bundle was closed")


def test_several_bundles_at_once(zoo: Path) -> None:
    first, second = stagec.load(zoo), stagec.load(zoo)
    x = np.ones(8, np.float32)
    expected = first["loop"](x)[1]
    first.close()
    np.testing.assert_array_equal(second["loop"](x)[1], expected)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by an entry for each executable that XLA is handed: the thread's number."""
    threads: list[int] = []
    load = Executable.load

    def counted(*arguments: Any) -> Executable:
        threads.append(get_ident())
        return load(*arguments)

    monkeypatch.setattr(Executable, "load", counted)
    return threads


MLP = {"w": np.ones((16, 4), np.float32), "b": np.zeros(4, np.float32)}


def images(number: int) -> Any:
    return np.ones((number, 16), np.float32)


def test_calls_of_what_is_loaded_do_not_wait_for_other_loads(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the same function that is new in kind, one with a size that nobody asked for, and one of another."""
    bundle, begun, may_end = stagec.load(zoo), Event(), Event()
    mlp = bundle["mlp"]
    mlp(MLP, images(1))
    load = Executable.load

    def waiting(*arguments: Any) -> Executable:
        if not begun.is_set():
            begun.set()
            assert may_end.wait(60)
        return load(*arguments)

    monkeypatch.setattr(Executable, "load", waiting)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(mlp, MLP, images(4))
        try:
            assert begun.wait(60)
            assert mlp(stagec.device_put(MLP), images(1)).shape == (1, 4)
            assert mlp(MLP, images(1)).shape == (1, 4)
            assert bundle["loop"](np.ones(8, np.float32))[1].shape == (8,)
            with pytest.raises(stagec.CallError, match="buckets: batch = 1; batch = 4"):
                mlp(MLP, images(3))
            assert not slow.done()
        finally:
            may_end.set()
        assert slow.result().shape == (4, 4)


def test_threads_that_ask_for_the_same_executable_load_it_once(zoo: Path, loads: list[int]) -> None:
    bundle, start = stagec.load(zoo), Barrier(THREADS)

    def work(_: int) -> Any:
        start.wait()
        return bundle["mlp"](MLP, images(4))

    with ThreadPoolExecutor(THREADS) as pool:
        assert {result.shape for result in pool.map(work, range(THREADS))} == {(4, 4)}
    assert len(loads) == 1


def test_a_load_that_fails_is_tried_again(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, refused = Executable.load, stagec.LoadError("executable", "no memory")
    monkeypatch.setattr(Executable, "load", lambda *arguments: (_ for _ in ()).throw(refused))
    mlp = stagec.load(zoo)["mlp"]
    for _ in range(2):
        with pytest.raises(stagec.LoadError, match="no memory"):
            mlp(MLP, images(4))
    monkeypatch.setattr(Executable, "load", load)
    assert mlp(MLP, images(4)).shape == (4, 4)


def test_a_bundle_that_is_closed_while_it_loads(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, load = stagec.load(zoo), Executable.load

    def closing(*arguments: Any) -> Executable:
        bundle.close()
        return load(*arguments)

    monkeypatch.setattr(Executable, "load", closing)
    mlp = bundle["mlp"]
    assert mlp(MLP, images(4)).shape == (4, 4)  # it ends normally
    with pytest.raises(stagec.CallError, match="the bundle was closed"):
        mlp(MLP, images(4))


def test_preload_loads_all_sizes_and_calls_load_nothing(zoo: Path, loads: list[int]) -> None:
    with stagec.load(zoo) as bundle:
        bundle.preload(["mlp", "named", "from_file"])
        assert len(loads) == 2 + 2 + 1
        for number in (1, 4):
            assert bundle["mlp"](MLP, images(number)).shape == (number, 4)
        bundle["named"](np.ones(3, np.float32), np.ones(7, np.float32), shift=np.float32(1), power=3)
        bundle["from_file"](np.ones(2, np.float32))
        assert len(loads) == 5
        bundle.preload(["named-cube"])
        assert len(loads) == 5
        bundle.preload()
        assert len(loads) == sum(map(len, (function.descriptions for function in bundle.values())))
        assert len({*loads}) > 1


def test_preload_puts_weights_where_calls_take_them(zoo: Path) -> None:
    with stagec.load(zoo) as bundle:
        bundle.preload(["from_file"])
        for weight in bundle["from_file"].weights.values():
            assert len(weight._arrays) == 1


def test_preload_loads_several_at_a_time(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, both = Executable.load, Barrier(2, timeout=60)

    def together(*arguments: Any) -> Executable:
        both.wait()
        return load(*arguments)

    monkeypatch.setattr(Executable, "load", together)
    with stagec.load(zoo) as bundle:
        bundle.preload(["mlp"], threads=2)
        assert bundle["mlp"](MLP, images(1)).shape == (1, 4)


def test_preload_compiles_what_calls_would_compile(zoo: Path, tmp_path: Path, loads: list[int]) -> None:
    exported = without_executables(only(zoo, tmp_path / "loop.aot", "loop"), tmp_path / "exported.aot")
    compiled: list[str] = []
    with stagec.load(exported) as bundle:
        settings = bundle._loaded.settings
        make = settings.compiler
        assert make is not None
        bundle._loaded.settings = settings._replace(
            compiler=lambda *given: (compiled.append(given[1]), make(*given))[1]
        )
        for _ in range(2):
            bundle.preload()
        bundle["loop"](np.ones(8, np.float32))
    assert (compiled, loads) == (["cpu"], [])


def test_what_preload_refuses(zoo: Path, tmp_path: Path) -> None:
    bundle = stagec.load(zoo)
    with pytest.raises(KeyError, match='the bundle zoo has no function "mpl": did you mean "mlp"'):
        bundle.preload(["mpl"])
    bundle.close()
    with pytest.raises(stagec.CallError, match="the bundle was closed"):
        bundle.preload(["mlp"])

    def elsewhere(index: Any) -> None:
        for executable in index["functions"]["mlp"]["executables"]:
            executable["versions"]["jaxlib"] = "0.0.1"

    other = edited_index(zoo, tmp_path / "other.aot", elsewhere)
    with stagec.load(other, policy="executable_only") as bundle:
        bundle.preload()  # all that runs here
        with pytest.raises(stagec.LoadError, match=r"it was compiled with jaxlib 0\.0\.1") as refusal:
            bundle.preload(["mlp"])
        assert refusal.value.code in ("jaxlib-version", "policy")
