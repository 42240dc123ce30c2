"""What tools/on_device does on a device, step by step. Each step is a process, and yields rows of the table.

A step that raises, hangs or ends its process costs its own rows alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

OK, WRONG, FAILED, SKIPPED = "as expected", "other than expected", "failed", "not tried"
TIMED = ("product", "stream", "layer")


class Row(NamedTuple):
    """A row of the table. raw: numbers, for the JSON file."""

    what: str
    expected: str
    measured: str
    verdict: str
    raw: Mapping[str, Any] = {}


class Step(NamedTuple):
    """A step.

    seconds: that it may take. run: does it, with the folder that was prepared and one for results.
    """

    seconds: int
    run: Callable[[Path, Path], Iterator[Row]]

    @property
    def about(self) -> str:
        """What it is about, without the full stop."""
        return (self.run.__doc__ or "").rstrip(".")


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


def describe(folder: Path, out: Path) -> Iterator[Row]:
    """`stagec describe-device` on the device."""
    done = _stagec("describe-device", "--output", out / "device.toml", out=out)
    if done.returncode:
        yield Row("stagec describe-device", "a description", _said(done.stderr), FAILED)
        return
    here = tomllib.loads((out / "device.toml").read_text())
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


def load(folder: Path, out: Path) -> Iterator[Row]:
    """XLA loads executables that were compiled and edited without a device."""
    started = time.perf_counter()
    import stagec

    devices = stagec.devices(os.environ["ON_DEVICE_PLATFORM"])
    kind, version = devices[0].device_kind, devices[0].client.platform_version.replace("\n", " ")
    took = time.perf_counter() - started
    yield Row("a client", "devices", f"{len(devices)} {kind}, {version}", OK, {"seconds": took})
    bundle = _bundle(folder)
    for name in bundle:
        chosen = bundle.select(name).chosen
        if chosen is None:
            if name != "halves":
                yield Row(name, "an executable that runs here", _reasons(bundle, name), WRONG)
            continue
        started = time.perf_counter()
        try:
            for loading in bundle[name]._of[""].loads():
                loading()
        except stagec.LoadError as error:
            yield Row(name, "XLA loads it", f"{error.code}: {_last(str(error))}", FAILED)
        else:
            yield Row(name, "XLA loads it", "loaded", OK, {"seconds": time.perf_counter() - started})


def _reasons(bundle: Any, name: str) -> str:
    return "; ".join(candidate.reason for candidate in bundle.select(name).candidates)


def golden(folder: Path, out: Path) -> Iterator[Row]:
    """Results on the device against those of JAX on a CPU."""
    from stagec.bundle.archive import Archive
    from stagec.checking import golden as checking
    from stagec.core.messages.refusal import Refusal

    archive = Archive(str(folder / "on_device.aot"))
    for name, function in archive.index["functions"].items():
        if "golden" not in function or name == "halves":
            continue
        try:
            checks = list(checking.check(archive, name))
        except Refusal as error:
            yield Row(name, "JAX's results", f"{error.code}: {_last(str(error))}", FAILED)
            continue
        for skipped in checks:
            if isinstance(skipped, checking.Skipped):
                yield Row(name, "JAX's results", skipped.why, SKIPPED)
        rows = [row for row in checks if isinstance(row, checking.Check)]
        if rows:
            worst = max(rows, key=lambda row: row.absolute)
            allowed = f"within {worst.atol:.2g} + {worst.rtol:.2g} * |value|"
            raw = {row.path: {"absolute": row.absolute, "relative": row.relative} for row in rows}
            yield Row(name, allowed, f"{worst.absolute:.2g}", _verdict(all(row.ok for row in rows)), raw)


def memory(folder: Path, out: Path) -> Iterator[Row]:
    """The memory that the description says against the memory that XLA takes."""
    import stagec

    device = stagec.devices(os.environ["ON_DEVICE_PLATFORM"])[0]
    bundle = _bundle(folder)
    rows = [(bundle[name], *_arguments(bundle[name])) for name in TIMED]
    # A device tells the peak of the process alone: what takes more comes later.
    for function, args, kwargs, description in sorted(
        rows, key=lambda row: row[3].memory_analysis["peak_memory_in_bytes"]
    ):
        told = description.memory_analysis["peak_memory_in_bytes"]
        function(*args, **kwargs)
        taken = (device.memory_stats() or {}).get("peak_bytes_in_use")
        if taken is None:
            yield Row(function.name, f"{told:,} bytes", "the plugin does not say", SKIPPED)
            continue
        # An allocator gives whole pieces.
        right = 0.98 * told <= taken <= 1.1 * told + (4 << 20)
        raw = {"told": told, "taken": taken, "ratio": taken / told}
        yield Row(function.name, f"{told:,} bytes", f"{taken:,} bytes, {taken / told:.2f}x", _verdict(right), raw)


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


def roofline(folder: Path, out: Path) -> Iterator[Row]:
    """The estimated time against the time."""
    bundle = _bundle(folder)
    for name in TIMED:
        args, kwargs, description = _arguments(bundle[name])
        told = description.analysis["roofline"]
        if isinstance(told, str):
            yield Row(name, told, "", SKIPPED)
            continue
        rounds = _seconds(*_on_device(bundle[name], args, kwargs))
        took, ratio = min(rounds), min(rounds) / told["seconds"]
        raw = {"told": told, "rounds": rounds, "ratio": ratio}
        expected = f"{told['seconds']:.3g} s at best, bound by {told['bound']}; up to twice that"
        yield Row(name, expected, f"{took:.3g} s, {ratio:.2f}x", _verdict(0.9 <= ratio <= 2), raw)


def jax(folder: Path, out: Path) -> Iterator[Row]:
    """Calls with JAX's arrays, beside jax.jit."""
    import jax
    import jax.numpy as jnp

    import tools.on_device.model as model

    where = jax.devices()[0]
    bundle = _bundle(folder)
    for name in TIMED:
        args, kwargs, _ = _arguments(bundle[name])
        args, kwargs = jax.tree.map(jnp.asarray, (args, kwargs))
        given, wanted = bundle[name](*args, **kwargs), jax.jit(getattr(model, name))(*args, **kwargs)
        same = np.asarray(given).tobytes() == np.asarray(wanted).tobytes()
        apart = float(np.abs(np.asarray(given, np.float64) - np.asarray(wanted, np.float64)).max())
        scale = float(np.abs(np.asarray(wanted, np.float64)).max())
        right = given.devices() == {where} and apart <= 0.02 * scale
        told = f"{'the same bits' if same else f'{apart:.2g} of {scale:.2g}'}, on {where}"
        yield Row(name, f"what jax.jit gives, on {where}", told, _verdict(right), {"apart": apart, "scale": scale})
    state = {"a": jnp.ones((_rows(bundle), 8)), "b": jnp.ones(_rows(bundle))}
    new = bundle["update"](state, jnp.float32(1))
    gone = state["a"].is_deleted() and bool((new["b"] == 2).all())
    yield Row("update", "the donated state is deleted", "deleted" if gone else "kept", _verdict(gone))


def _rows(bundle: Any) -> int:
    (description,) = bundle["update"].descriptions
    return int(description.in_avals[0].shape[0])


def jax_cache(folder: Path, out: Path) -> Iterator[Row]:
    """JAX's compilation cache, built without a device."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "jax_cache")
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    import jax

    import stagec.jax_cache  # noqa: F401 - it changes what JAX looks for
    import tools.on_device.model as model

    bundle = _bundle(folder)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
    for name in ("product", "layer"):
        args, kwargs, _ = _arguments(bundle[name])
        events.clear()
        started = time.perf_counter()
        jax.block_until_ready(jax.jit(getattr(model, name))(*args, **kwargs))
        took = time.perf_counter() - started
        hits = events.count("cache_hits")
        yield Row(name, "JAX finds the entry", f"{hits} found", _verdict(hits > 0), {"seconds": took})


def pallas(folder: Path, out: Path) -> Iterator[Row]:
    """Pallas kernels."""
    bundle = _bundle(folder)
    for name in ("triton", "mosaic"):
        if name not in bundle:
            yield Row(name, "the sum of two arrays", "the folder has no such function", SKIPPED)
            continue
        args, kwargs, _ = _arguments(bundle[name])
        same = bool((np.asarray(bundle[name](*args, **kwargs)) == args[0] + args[1]).all())
        yield Row(name, "the sum of two arrays", "the same bits" if same else "other numbers", _verdict(same))


def failures(folder: Path, out: Path) -> Iterator[Row]:
    """What a full device says."""
    import stagec

    device = stagec.devices(os.environ["ON_DEVICE_PLATFORM"])[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") or 1 << 40
    try:
        stagec.device_put(np.zeros(int(1.1 * limit) // 4, np.float32), device).numpy()
        yield Row("an array larger than the memory", "RunError, memory", "it fits", WRONG)
    except stagec.RunError as error:
        right = error.code == "memory"
        yield Row("an array larger than the memory", "RunError, memory", f"RunError, {error.code}", _verdict(right))
    args, kwargs, _ = _arguments(bundle := _bundle(folder)["stream"])
    bundle(*args, **kwargs)
    yield Row("a call after that", "it runs", "it ran", OK)


def several(folder: Path, out: Path) -> Iterator[Row]:
    """A function over two devices."""
    import stagec

    if len(stagec.devices(os.environ["ON_DEVICE_PLATFORM"])) < 2:
        yield Row("halves", "arrays over two devices", "one device is here", SKIPPED)
        return
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    more, total = _bundle(folder)["halves"](x)
    right = bool((np.asarray(more) == x + 1).all() and (np.asarray(total) == x[:2] + x[2:]).all())
    yield Row("halves", "arrays over two devices", "equal" if right else "other numbers", _verdict(right))


def start(folder: Path, out: Path) -> Iterator[Row]:
    """The first result of a new process."""
    done = _stagec("bench", folder / "on_device.aot", "layer", "--starts", 3, "--rounds", 1, "--json", out=out)
    if done.returncode:
        yield Row("layer", "the first result of a new process", _said(done.stderr), FAILED)
        return
    told = json.loads(done.stdout)
    starts = told["functions"][0]["starts"]
    parts = ", ".join(f"{name} {float(np.median(starts[name])):.2f} s" for name in ("imported", "loaded", "called"))
    yield Row("layer", "the first result of a new process", parts, OK, told)


def autotune(folder: Path, out: Path) -> Iterator[Row]:
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
    yield Row("stagec autotune", "results for product and layer", told, _verdict(bool(results)))
    if not results:
        return
    bundle = _bundle(folder)
    for name in ("product", "layer"):
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
        raw = {"before": before, "after": after}
        yield Row(name, "no slower with results", f"{after / before:.2f}x", _verdict(after <= 1.05 * before), raw)


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
    "describe": Step(60, describe),
    "load": Step(120, load),
    "golden": Step(120, golden),
    "memory": Step(60, memory),
    "roofline": Step(90, roofline),
    "jax": Step(90, jax),
    "jax_cache": Step(60, jax_cache),
    "pallas": Step(60, pallas),
    "failures": Step(60, failures),
    "several": Step(60, several),
    "start": Step(60, start),
    "autotune": Step(180, autotune),
}
"""In this order: what matters most comes first."""
