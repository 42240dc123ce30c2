"""What same bytes cost at run time: programs compiled with and without each measure, timed in one run.

    python tools/determinism_cost.py [--rounds 15]

Prints a Markdown table of ratios, with all measures : without one, above 1 where the measure costs. Each setting
compiles in a separate process; all executables are loaded in one process, without any setting, and take turns. A
ratio is that of the medians. The last column compares two compilations with the same settings: the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# XLA compares tuning hints with the machine's features, and reports an error for each that it misses.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, str(Path(__file__).absolute().parent.parent / "compiler"))

ISA = "AVX2"
CORES = str(os.cpu_count())  # the target is this machine: another parallelism is another target, not a measure's cost


@dataclass(frozen=True)
class Setting:
    """How programs are compiled: for another CPU, with equal hash seeds, with that NPROC, on one core; or not."""

    isa: str = ISA
    seeds: bool = True
    nproc: str = CORES
    one_core: bool = True


# The first is what stagec does; the others drop a measure, but for the last.
SETTINGS = {
    "all measures": Setting(),
    "the hash tables' own seeds": Setting(seeds=False),
    "machine's cores": Setting(nproc="", one_core=False),
    "machine's CPU": Setting(isa=""),
    "all measures, again": Setting(),
}


def programs() -> dict[str, tuple[object, list[object]]]:
    """Return name -> (function, arguments): small hot loops, and what models are made of."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    rng = np.random.default_rng(0)

    def f32(*shape: int) -> object:
        return rng.normal(size=shape).astype(np.float32)

    def newton(x):
        return lax.fori_loop(0, 1000, lambda _, y: y - (y * y - x * x - 1) / (2 * y), jnp.ones_like(x))

    def train(w, x):
        loss = lambda w: ((jnp.tanh(x @ w) - 1) ** 2).mean()  # noqa: E731
        return lax.scan(lambda w, _: (w - 0.1 * jax.grad(loss)(w), None), w, length=20)[0]

    def attention(q):
        return jax.nn.softmax(q @ q.swapaxes(-1, -2)) @ q

    def convolution(x, k):
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return {
        "newton, 1000 steps on 8 floats": (newton, [f32(8)]),
        "normal numbers, 100,000": (
            lambda s: jax.random.normal(jax.random.wrap_key_data(s), (100000,)),
            [np.zeros(2, np.uint32)],
        ),
        "recurrence, 256 steps of 32": (
            lambda w, x: lax.scan(lambda h, r: (jnp.tanh(h @ w + r), h), x[0], x),
            [f32(32, 32), f32(256, 32)],
        ),
        "training, 20 steps of 64 x 64": (train, [f32(64, 64), f32(128, 64)]),
        "elementwise, 4 million": (lambda x: jnp.exp(jnp.sin(x)) + x * x, [f32(4000000)]),
        "matmul, 512 x 512": (lambda x: x @ x, [f32(512, 512)]),
        "attention, 8 x 128 x 64": (attention, [f32(8, 128, 64)]),
        "convolution, 8 x 32 x 32 x 16": (convolution, [f32(8, 32, 32, 16), f32(3, 3, 16, 16)]),
        "sort, 100,000": (jnp.sort, [f32(100000)]),
        "cholesky, 128 x 128": (lambda x: jnp.linalg.cholesky(x @ x.T + 200 * jnp.eye(128)), [f32(128, 128)]),
    }


def compile_all(folder: Path, setting: Setting) -> None:
    """Compile every program as `setting` says, and store the executables and their custom calls."""
    import jax

    from stagec.hardware import x86
    from stagec.patches import cores, cpuid, hash_seeds, machine_code

    if setting.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    code = machine_code.loaded("libjax_common.so")
    changes = [*(cpuid.patches(code, x86.ISA[setting.isa]) if setting.isa else ())]
    changes += hash_seeds.patches(code) if setting.seeds else []
    changes += cores.patches(code, int(setting.nproc)) if setting.one_core else []
    with machine_code.patched(changes):
        for number, (function, arguments) in enumerate(programs().values()):
            compiled = jax.jit(function).lower(*arguments).compile()
            calls = sorted(set(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text())))
            (folder / f"{number}.json").write_text(json.dumps(calls))
            (folder / f"{number}.xla").write_bytes(compiled.runtime_executable().serialize())


def per_call(executable: Any, arguments: list[Any]) -> float:
    """Return the seconds that a call takes, over calls for a twentieth of a second."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.05:
        for (result,) in executable.execute_sharded(arguments).disassemble_into_single_device_arrays():
            result.block_until_ready()
        count += 1
    return (time.perf_counter() - start) / count


def main() -> None:
    """Compile in a process for each setting, time all in this one by turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as scratch:
        folders = {}
        for name, setting in SETTINGS.items():
            folders[name] = Path(scratch, name)
            folders[name].mkdir()
            env = {**os.environ, "JAX_PLATFORMS": "cpu"} | ({"NPROC": setting.nproc} if setting.nproc else {})
            subprocess.run([sys.executable, __file__, "--compile", name, str(folders[name])], env=env, check=True)
        measure(folders, rounds)


def measure(folders: dict[str, Path], rounds: int) -> None:
    """Load what was compiled as a loaded bundle does, and print the table."""
    import jax
    from jaxlib import _jax

    from stagec.pjrt.custom_calls import register_custom_calls

    device = jax.devices()[0]
    base, *others = SETTINGS
    print("| program | " + " | ".join(f"against {name}" for name in others) + " |")
    print("| --- |" + " --- |" * len(others))
    for number, (program, (_, values)) in enumerate(programs().items()):
        arguments = [jax.device_put(value) for value in values]
        loaded = {}
        for name, folder in folders.items():
            register_custom_calls(json.loads((folder / f"{number}.json").read_text()))
            serialized = (folder / f"{number}.xla").read_bytes()
            loaded[name] = device.client.deserialize_executable(serialized, _jax.DeviceList((device,)))
        times: dict[str, list[float]] = {name: [] for name in loaded}
        for _ in range(rounds):
            for name, executable in loaded.items():
                times[name].append(per_call(executable, arguments))
        median = {name: statistics.median(seconds) for name, seconds in times.items()}
        print(
            f"| {program} | " + " | ".join(f"{median[base] / median[name]:.2f}" for name in others) + " |", flush=True
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_all(Path(sys.argv[3]), SETTINGS[sys.argv[2]])
    else:
        main()
