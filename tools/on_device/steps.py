"""What tools/on_device does on a device, step by step. Each step is a process, and yields rows of the table.

A step that raises, hangs or ends its process costs its own rows alone. A step of many parts, such as one for each
function, goes on in a new process after a part that failed: after some errors, all calls of a process fail.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import runpy
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

OK, WRONG, FAILED, SKIPPED = "as expected", "other than expected", "failed", "not tried"
TIMED = ("product", "stream", "layer")
TUNED = ("product", "layer", "convolved", "gradient")
DEVICE = "device.toml"
"""What the device says of itself."""


class Row(NamedTuple):
    """A row of the table. raw: numbers, for the JSON file."""

    what: str
    expected: str
    measured: str
    verdict: str
    raw: Mapping[str, Any] = {}


class Step(NamedTuple):
    """A step.

    seconds: its share of the time. run: does it, with the folder that was prepared, one for files that nobody keeps,
    and a part, which is "" without parts. parts: what it does one after the other, in a prepared folder; None: all at
    once. silence: the seconds that a part may take; None: as long as the step. alone: each part has a process of its
    own.
    """

    seconds: int
    run: Callable[[Path, Path, str], Iterator[Row]]
    parts: Callable[[Path], Sequence[str]] | None = None
    silence: int | None = None
    alone: bool = False

    @property
    def about(self) -> str:
        """What it is about, without the full stop."""
        return (self.run.__doc__ or "").rstrip(".")


def do(name: str, folder: Path, out: Path, parts: Sequence[str]) -> Iterator[Row | str]:
    """Do a step, and yield its rows; before each part, its name. It ends after a part that failed."""
    for part in parts:
        yield part
        failed = False
        for row in STEPS[name].run(folder, out, part):
            yield row
            failed |= row.verdict == FAILED
        if failed or STEPS[name].alone:
            return


def _timed(folder: Path) -> Sequence[str]:
    return TIMED


def _functions(folder: Path) -> Sequence[str]:
    """All but the one for several devices, which has a step."""
    return [name for name in _index(folder) if name != "halves"]


def _compared(folder: Path) -> Sequence[str]:
    return [name for name in _functions(folder) if "golden" in _index(folder)[name]]


def _programs(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.glob("programs/*"))


def _index(folder: Path) -> Mapping[str, Any]:
    from stagec.bundle.archive import Archive

    functions: Mapping[str, Any] = Archive(str(folder / "on_device.aot")).index["functions"]
    return functions


def _verdict(right: bool) -> str:
    return OK if right else WRONG


def _bundle(folder: Path) -> Any:
    import stagec

    return stagec.load(folder / "on_device.aot", policy="executable_only")


def _arguments(function: Any, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    from stagec.checking import trials

    (description,) = function.descriptions
    return *trials.structured(function, description, trials.random_arguments(description, seed)), description


def _stagec(*words: str | Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagec", *map(str, words)]
    return subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)


def _last(text: str) -> str:
    return next(iter(text.strip().splitlines()[-1:]), "")


def _said(stderr: str) -> str:
    """Return the end of what a command said: its message, and what to write instead, in lines that are indented."""
    lines = stderr.strip().splitlines()
    message = max((at for at, line in enumerate(lines) if not line.startswith(" ")), default=0)
    return "; ".join(line.strip() for line in lines[message:])


def describe(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """`stagec describe-device` on the device, and the folder of those prepared that is for it."""
    done = _stagec("describe-device", "--output", out / DEVICE, out=out)
    if done.returncode:
        yield Row("stagec describe-device", "a description", _said(done.stderr), FAILED)
        return
    here = tomllib.loads((out / DEVICE).read_text())
    folder = chosen(folder, out)
    wanted = tomllib.loads((folder / "source" / "device.toml").read_text())
    # Drivers report clocks and bandwidths that differ a little, and the memory that is left of what there is.
    close = {"clock_rate_ghz": 0.05, "memory_bandwidth": 0.05, "device_memory_size": 0.1, "pcie_bandwidth": 0.5}
    for name in sorted({*here} & {*wanted} - {"doc", "source"}):
        near = close.get(name, 0)
        told, given = wanted[name], here[name]
        right = told == given or (near and abs(given - told) <= near * told)
        if not right or name in ("name", "compute_capability"):
            yield Row(f"{name} of the device", str(told), str(given), _verdict(bool(right)))
    yield Row("other properties of the description", "those of the target", f"{len(here)} read", OK, here)


def chosen(folder: Path, out: Path) -> Path:
    """Return the folder of those prepared that is for the device here: the one that has most of its properties.

    A device that told nothing gets the first.
    """
    described = out / DEVICE
    here = tomllib.loads(described.read_text()) if described.exists() else {}

    def equal(prepared: Path) -> tuple[bool, int]:
        wanted = tomllib.loads((prepared / "source" / "device.toml").read_text())
        return wanted["name"] == here.get("name"), sum(wanted[name] == here.get(name) for name in wanted)

    return max(sorted(path for path in folder.iterdir() if (path / "source").is_dir()), key=equal)


CLIENT = "a client"
"""What is there before all functions."""


def load(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """XLA loads executables that were compiled and edited without a device."""
    import stagec

    if part == CLIENT:
        started = time.perf_counter()
        device = stagec.devices(os.environ["ON_DEVICE_PLATFORM"])[0]
        kind, version = device.device_kind, device.client.platform_version.replace("\n", " ")
        yield Row(part, "devices", f"{kind}, {version}", OK, {"seconds": time.perf_counter() - started})
        return
    bundle = _bundle(folder)
    if bundle.select(part).chosen is None:
        yield Row(part, "an executable that runs here", _reasons(bundle, part), WRONG)
        return
    started = time.perf_counter()
    try:
        for loading in bundle[part]._of[""].loads():
            loading()
    except stagec.LoadError as error:
        yield Row(part, "XLA loads it", f"{error.code}: {_last(str(error))}", FAILED)
    else:
        yield Row(part, "XLA loads it", "loaded", OK, {"seconds": time.perf_counter() - started})


def _reasons(bundle: Any, name: str) -> str:
    return "; ".join(candidate.reason for candidate in bundle.select(name).candidates)


def golden(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """Results on the device against those of JAX on a CPU."""
    from stagec.bundle.archive import Archive
    from stagec.checking import golden as checking
    from stagec.core.messages.refusal import Refusal

    try:
        checks = list(checking.check(Archive(str(folder / "on_device.aot")), part))
    except Refusal as error:
        yield Row(part, "JAX's results", f"{error.code}: {_last(str(error))}", FAILED)
        return
    for skipped in checks:
        if isinstance(skipped, checking.Skipped):
            yield Row(part, "JAX's results", skipped.why, SKIPPED)
    rows = [row for row in checks if isinstance(row, checking.Check)]
    if rows:
        worst = max(rows, key=lambda row: row.absolute)
        allowed = f"within {worst.atol:.2g} + {worst.rtol:.2g} * |value|"
        raw = {row.path: {"absolute": row.absolute, "relative": row.relative} for row in rows}
        yield Row(part, allowed, f"{worst.absolute:.2g}", _verdict(all(row.ok for row in rows)), raw)


def memory(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """The memory that the description says against the memory that XLA takes."""
    import stagec

    device = stagec.devices(os.environ["ON_DEVICE_PLATFORM"])[0]
    function = _bundle(folder)[part]
    args, kwargs, description = _arguments(function)
    told = description.memory_analysis["peak_memory_in_bytes"]
    function(*args, **kwargs)
    taken = (device.memory_stats() or {}).get("peak_bytes_in_use")
    if taken is None:
        yield Row(part, f"{told:,} bytes", "the plugin does not say", SKIPPED)
        return
    # An allocator gives whole pieces.
    right = 0.98 * told <= taken <= 1.1 * told + (4 << 20)
    raw = {"told": told, "taken": taken, "ratio": taken / told}
    yield Row(part, f"{told:,} bytes", f"{taken:,} bytes, {taken / told:.2f}x", _verdict(right), raw)


def _on_device(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return a flat call, and its arguments on the device."""
    import stagec

    (device,) = stagec.devices(os.environ["ON_DEVICE_PLATFORM"], 1)
    (description,) = function.descriptions
    leaves = description.in_tree.flatten((args, kwargs))
    return function.flat(*args, **kwargs), [stagec.device_put(leaf, device) for leaf in leaves]


def _seconds(call: Any, leaves: Sequence[Any], rounds: int = 7) -> list[float]:
    """Return the seconds of a call in each round: many at once, so that the device waits for none."""
    from jaxlib import _jax

    def calls(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            results = call(*leaves)
        _jax.batched_block_until_ready([result._buffer for result in results])
        return (time.perf_counter() - started) / count

    calls(1)
    once = calls(3)
    count = max(1, min(200, round(0.3 / max(once, 1e-6))))
    return [calls(count) for _ in range(rounds)]


def roofline(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """The estimated time against the time."""
    function = _bundle(folder)[part]
    args, kwargs, description = _arguments(function)
    told = description.analysis["roofline"]
    if isinstance(told, str):
        yield Row(part, told, "", SKIPPED)
        return
    rounds = _seconds(*_on_device(function, args, kwargs))
    took, ratio = min(rounds), min(rounds) / told["seconds"]
    raw = {"told": told, "rounds": rounds, "ratio": ratio}
    expected = f"{told['seconds']:.3g} s at best, bound by {told['bound']}; up to twice that"
    yield Row(part, expected, f"{took:.3g} s, {ratio:.2f}x", _verdict(0.9 <= ratio <= 2), raw)


def jax(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """Calls with JAX's arrays, beside jax.jit."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import tools.on_device.model as model

    where = jax.devices()[0]
    bundle = _bundle(folder)
    if part == "update":
        state = {"a": jnp.ones((_rows(bundle), 8)), "b": jnp.ones(_rows(bundle))}
        new = bundle["update"](state, jnp.float32(1))
        gone = state["a"].is_deleted() and bool((new["b"] == 2).all())
        yield Row(part, "the donated state is deleted", "deleted" if gone else "kept", _verdict(gone))
        return
    args, kwargs, _ = _arguments(bundle[part])
    args, kwargs = jax.tree.map(jnp.asarray, (args, kwargs))
    given, wanted = bundle[part](*args, **kwargs), jax.jit(getattr(model, part))(*args, **kwargs)
    same = np.asarray(given).tobytes() == np.asarray(wanted).tobytes()
    apart = float(np.abs(np.asarray(given, np.float64) - np.asarray(wanted, np.float64)).max())
    scale = float(np.abs(np.asarray(wanted, np.float64)).max())
    right = given.devices() == {where} and apart <= 0.02 * scale
    told = f"{'the same bits' if same else f'{apart:.2g} of {scale:.2g}'}, on {where}"
    yield Row(part, f"what jax.jit gives, on {where}", told, _verdict(right), {"apart": apart, "scale": scale})


def _rows(bundle: Any) -> int:
    (description,) = bundle["update"].descriptions
    return int(description.in_avals[0].shape[0])


def jax_cache(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """JAX's compilation cache, built without a device."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "jax_cache")
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    import jax

    import stagec.jax_cache  # noqa: F401 - it changes what JAX looks for
    import tools.on_device.model as model

    args, kwargs, _ = _arguments(_bundle(folder)[part])
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
    started = time.perf_counter()
    jax.block_until_ready(jax.jit(getattr(model, part))(*args, **kwargs))
    took = time.perf_counter() - started
    hits = events.count("cache_hits")
    yield Row(part, "JAX finds the entry", f"{hits} found", _verdict(hits > 0), {"seconds": took})


def programs(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """Unchanged programs, which were rehearsed and built without a device, find all in JAX's compilation cache."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "programs" / part / "jax_cache")
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    import jax

    import stagec.jax_cache  # noqa: F401 - it changes what JAX looks for

    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        runpy.run_path(str(folder / "programs" / part / f"{part}.py"))
    raw = {"seconds": time.perf_counter() - started}
    hits, asked = (events.count(event) for event in ("cache_hits", "compile_requests_use_cache"))
    yield Row(part, "JAX finds all of its programs", f"{hits} of {asked} found", _verdict(hits == asked > 0), raw)


def pallas(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """Pallas kernels."""
    import numpy as np

    function = _bundle(folder)[part]
    args, kwargs, _ = _arguments(function)
    same = bool((np.asarray(function(*args, **kwargs)) == args[0] + args[1]).all())
    yield Row(part, "the sum of two arrays", "the same bits" if same else "other numbers", _verdict(same))


_MAP_NORESERVE = 0x4000
"""Of Linux; Python has the name from 3.13 on."""


def failures(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """What a full device says."""
    import numpy as np

    import stagec

    device = stagec.devices(os.environ["ON_DEVICE_PLATFORM"])[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") or 1 << 40
    # Memory that nothing reads or writes, so this machine may have less.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    zeros = np.frombuffer(mmap.mmap(-1, int(1.1 * limit) // 4 * 4, flags=flags), np.float32)
    try:
        stagec.device_put(zeros, device).numpy()
        yield Row("an array larger than the memory", "RunError, memory", "it fits", WRONG)
    except stagec.RunError as error:
        right = error.code == "memory"
        yield Row("an array larger than the memory", "RunError, memory", f"RunError, {error.code}", _verdict(right))
    args, kwargs, _ = _arguments(bundle := _bundle(folder)["stream"])
    bundle(*args, **kwargs)
    yield Row("a call after that", "it runs", "it ran", OK)


def several(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """A function over two devices."""
    import numpy as np

    import stagec

    if len(stagec.devices(os.environ["ON_DEVICE_PLATFORM"])) < 2:
        yield Row("halves", "arrays over two devices", "one device is here", SKIPPED)
        return
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    more, total = _bundle(folder)["halves"](x)
    right = bool((np.asarray(more) == x + 1).all() and (np.asarray(total) == x[:2] + x[2:]).all())
    yield Row("halves", "arrays over two devices", "equal" if right else "other numbers", _verdict(right))


def start(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """The first result of a new process."""
    done = _stagec("bench", folder / "on_device.aot", "layer", "--starts", 3, "--rounds", 1, "--json", out=out)
    if done.returncode:
        yield Row("layer", "the first result of a new process", _said(done.stderr), FAILED)
        return
    told = json.loads(done.stdout)
    starts = told["functions"][0]["starts"]
    parts = ", ".join(f"{name} {statistics.median(starts[name]):.2f} s" for name in ("imported", "loaded", "called"))
    yield Row("layer", "the first result of a new process", parts, OK, told)


def autotune(folder: Path, out: Path, part: str) -> Iterator[Row]:
    """`stagec autotune`, and code that is compiled with its results."""
    from stagec.hardware import autotuning

    done = _stagec("autotune", folder / "inputs.json", "--root", out, out=out)
    file = out / "device.autotune.textproto"
    if done.returncode or not file.exists():
        yield Row("stagec autotune", "a file of results", _said(done.stderr), FAILED)
        return
    results = autotuning.read(file.read_text())
    kinds = ", ".join(sorted({kind for result in results for kind, _ in result.chosen}))
    told = f"{len(results)}: {kinds}" if results else "XLA timed nothing"
    raw = {"file": file.read_text()}
    asked = json.loads((folder / "inputs.json").read_text())["exports"]
    names = [name for name in TUNED if f"on_device.{name}" in asked]
    yield Row("stagec autotune", f"results for {', '.join(names)}", told, _verdict(bool(results)), raw)
    if not results:
        return
    bundle = _bundle(folder)
    for name in names:
        tuned = _tuned(folder, out, name, file.read_text())
        if isinstance(tuned, str):
            yield Row(name, "XLA finds all results, by the text of kernels", tuned, FAILED)
            continue
        yield Row(name, "XLA finds all results, by the text of kernels", "it does", OK)
        import stagec

        args, kwargs, _ = _arguments(bundle[name])
        before, after = (
            min(_seconds(*_on_device(each[name], args, kwargs)))
            for each in (bundle, stagec.load(tuned, policy="executable_only"))
        )
        times = {"before": before, "after": after}
        yield Row(name, "no slower with results", f"{after / before:.3g}x", _verdict(after <= 1.05 * before), times)


def _tuned(folder: Path, out: Path, name: str, results: str) -> Path | str:
    """Compile a function with results, and bundle it; return the bundle, or why there is none."""
    stem = folder / f"on_device.{name}"
    spec = json.loads((folder / f"on_device.{name}.device.spec").read_text())
    spec["target"]["autotuning_results"] = results
    tuned = {part: out / f"tuned.{name}.{part}" for part in ("spec", "xla", "json", "mlirbc", "aot")}
    tuned["spec"].write_text(json.dumps(spec))
    words = ["--exported", f"{stem}.exported", "--lowered", f"{stem}.lowered", "--spec", tuned["spec"]]
    outputs = ["--output", tuned["xla"], "--description", tuned["json"], "--module", tuned["mlirbc"]]
    done = _stagec("action", "compile", *words, *outputs, out=out)
    if done.returncode:
        return _said(done.stderr)
    export = f"on_device.{name}:{stem}.exported:{stem}.spec:{stem}.exported.json"
    executable = f"on_device.{name}.device:{tuned['xla']}:{tuned['json']}:{tuned['mlirbc']}"
    words = ["--name", "on_device", "--version", "1.0.0", "--output", tuned["aot"]]
    done = _stagec("action", "bundle", *words, "--export", export, "--executable", executable, out=out)
    return _said(done.stderr) if done.returncode else tuned["aot"]


STEPS: Mapping[str, Step] = {
    "describe": Step(20, describe),
    "load": Step(60, load, lambda folder: [CLIENT, *_functions(folder)], 30),
    "golden": Step(100, golden, _compared, 25),
    "memory": Step(40, memory, _timed, 20, alone=True),
    "jax_cache": Step(30, jax_cache, lambda folder: ("product", "layer"), 20),
    "programs": Step(40, programs, _programs, alone=True),
    "start": Step(30, start),
    "roofline": Step(30, roofline, _timed, 20),
    "pallas": Step(20, pallas, lambda folder: [name for name in ("triton", "mosaic") if name in _index(folder)], 15),
    "jax": Step(30, jax, lambda folder: (*TIMED, "update"), 20),
    "several": Step(15, several),
    "failures": Step(15, failures),
    "autotune": Step(50, autotune),
}
"""In this order: what chooses the folder, then what matters most. All shares are 8 minutes."""
