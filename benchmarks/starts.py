"""What a process does from its start to its first result, in the ways that `cold_start` compares.

python starts.py WAY FUNCTION FOLDER; it writes a line when the result is there. Imports are those of the way alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

WIDTH, LAYERS, LENGTH = 64, 24, 16
"""As in functions.py, which imports JAX."""


def arguments(function: str) -> tuple[Any, ...]:
    """Return numpy arrays for a function of functions.py."""
    import numpy as np

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, np.float32)

    if function == "scalar":
        return (zeros(),)
    if function == "tree":
        return ({f"part{i:02}": {f"weight{j}": zeros(4) for j in range(10)} for i in range(20)},)
    if function == "mlp":
        return {"first": zeros(WIDTH, 256), "second": zeros(256, 256), "last": zeros(256, 16)}, zeros(8, WIDTH)
    square = {name: zeros(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
    params = square | {"up": zeros(WIDTH, 4 * WIDTH), "down": zeros(4 * WIDTH, WIDTH)}
    return params if function == "block" else [params] * LAYERS, zeros(LENGTH, WIDTH)


def stagec(function: str, folder: Path) -> None:
    """Load a bundle and call."""
    import numpy as np

    import stagec

    bundle = stagec.load(folder / "functions.aot", policy="executable_only")
    np.asarray(bundle[function](*arguments(function)))


def steps(function: str, folder: Path) -> None:
    """The same, step by step; write the seconds of each as JSON. The bundle has one size of the function."""
    import json
    import time

    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def end_of(step: str) -> None:
        nonlocal last
        last, before = time.perf_counter(), last
        seconds[step] = last - before

    import numpy as np

    end_of("import numpy")
    from jaxlib import xla_client  # noqa: F401  # for its time

    end_of("import jaxlib")
    import stagec

    open_bundle, make_client = stagec.load, stagec.devices
    end_of("import stagec")
    given = arguments(function)
    last = time.perf_counter()
    called = open_bundle(folder / "functions.aot", policy="executable_only")[function]
    end_of("index")
    _ = called.descriptions
    end_of("description")
    make_client()
    end_of("client")
    called.input_shardings(*given)
    end_of("executable")
    np.asarray(called(*given))
    end_of("first call")
    print(json.dumps(seconds))


def load(function: str, folder: Path) -> tuple[Any, Any]:
    """Load an executable with jaxlib, and nothing else."""
    import os

    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"
    from jaxlib import _jax, xla_client

    device = xla_client.make_cpu_client(num_devices=1).local_devices()[0]
    bucket = ".rows8" if function == "mlp" else ""
    serialized = (folder / f"functions.{function}.cpu-avx2{bucket}.xla").read_bytes()
    options = xla_client.CompileOptions()
    return device, device.client.deserialize_executable(serialized, _jax.DeviceList((device,)), options)


def load_and_run(function: str, folder: Path) -> None:
    """The same, and run it once: what XLA prepares when an executable runs for the first time is counted."""
    import numpy as np
    from jaxlib import _jax, xla_client

    class Aval:
        weak_type = False

        def __init__(self, array: Any) -> None:
            self.shape, self.dtype = array.shape, array.dtype

    class Whole(_jax.SingleDeviceSharding):  # type: ignore[misc]
        memory_kind = None

        def _to_xla_hlo_sharding(self, ndim: int) -> Any:
            return xla_client.HloSharding.replicate()

    device, executable = load(function, folder)
    leaves, _ = _jax.pytree.PyTreeRegistry().flatten(arguments(function))
    sharding, copied = Whole(device), xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
    put = _jax.batched_device_put
    buffers = [put(Aval(x), sharding, [x], [device], True, False, copied, True) for x in leaves]
    result = Aval(np.zeros((8, 16) if function == "mlp" else (LENGTH, WIDTH), np.float32))
    handler = _jax.array_result_handler(result, sharding, True, True)
    (output,) = executable.execute_sharded(buffers).consume_with_handlers([handler])
    output.block_until_ready()


def jit(function: str, folder: Path) -> None:
    """Trace, lower, compile and call."""
    import jax

    from benchmarks import functions

    jax.jit(getattr(functions, function))(*arguments(function)).block_until_ready()


def cached(function: str, folder: Path) -> None:
    """The same with JAX's persistent compilation cache, which an earlier process has filled."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jit(function, folder)


def built(function: str, folder: Path) -> None:
    """The same with the cache that stagec built."""
    import jax

    import stagec.jax_cache  # noqa: F401  # for what it changes

    jax.config.update("jax_compilation_cache_dir", str(folder / "jax_cache"))
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
    jit(function, folder)
    assert len(hits) == 1, "the entry was missed"


def warm(function: str, folder: Path) -> None:
    """The same program, with a bundle: nothing is traced before the result."""
    import jax

    import stagec.jax

    traced: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **more: traced.append(more["fun_name"]) if "jaxpr_trace" in event else None
    )
    with stagec.jax.warm(folder / "functions.aot"):
        jit(function, folder)
    assert function not in traced


def exported(function: str, folder: Path) -> None:
    """Read a `jax.export` artifact, compile it and call."""
    import jax.export

    artifact = jax.export.deserialize(bytearray((folder / f"functions.{function}.exported").read_bytes()))
    artifact.call(*arguments(function)).block_until_ready()


def serialized(function: str, folder: Path) -> None:
    """Load what `jax.experimental.serialize_executable` wrote and call."""
    import pickle

    from jax.experimental import serialize_executable

    stored = pickle.loads((folder / "serialized").read_bytes())
    compiled = serialize_executable.deserialize_and_load(*stored)
    compiled(*arguments(function)).block_until_ready()


def prepare(function: str, folder: Path) -> None:
    """Write what `serialized` and `cached` find."""
    import pickle

    import jax
    from jax.experimental import serialize_executable

    from benchmarks import functions

    compiled = jax.jit(getattr(functions, function)).lower(*arguments(function)).compile()
    (folder / "serialized").write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    cached(function, folder)


if __name__ == "__main__":
    _, way, name, where = sys.argv
    globals()[way](name, Path(where))
    print("done", flush=True)
