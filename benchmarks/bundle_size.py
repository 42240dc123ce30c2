"""How large a bundle is: one function for three sizes and two targets, and what JAX writes for the same."""

from __future__ import annotations

import subprocess
import sys
import zipfile

from benchmarks import bundles
from benchmarks.measuring import Options, Row


def measure(options: Options) -> list[Row]:
    """Weigh a perceptron and 24 blocks of a transformer: bundles have parts that do not grow with the program."""
    return [_weighed("mlp", options), _weighed("model", options)]


def _weighed(function: str, options: Options) -> Row:
    """Weigh both, and what of the bundle is executables, the exported artifact and all else."""
    folder = options.folder / f"sized_{function}"
    bundle = bundles.build(function, folder, sized=True)
    theirs = 0
    for isa in bundles.TARGETS.values():
        env = bundles.environment(folder, XLA_FLAGS=f"--xla_cpu_max_isa={isa}")
        command = [sys.executable, "-s", "-S", __file__, function]
        theirs += int(subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout)
    with zipfile.ZipFile(bundle) as archive:
        sizes = {member.filename: member.file_size for member in archive.infolist()}
    parts = {
        suffix: sum(size for name, size in sizes.items() if name.endswith(suffix)) for suffix in (".xla", ".exported")
    }
    ours, rest = bundle.stat().st_size, sum(sizes.values()) - sum(parts.values())
    said = {
        "executables": parts[".xla"],
        "exported artifact": parts[".exported"],
        "modules, descriptions and index": rest,
    }
    note = ", ".join(f"{what} {size:,}" for what, size in said.items())
    name = f"bundle size, {function}, {ours:,} bytes for {theirs:,}"
    return Row(name, "jax serialize_executable", ours / theirs, 1.0, note=note)


def _serialized(function: str) -> int:
    """Return the bytes that JAX writes for this process's target."""
    import pickle

    import jax
    import numpy as np
    from jax.experimental import serialize_executable

    from benchmarks import functions, starts

    params, _ = starts.arguments(function)
    total = 0
    for rows in bundles.ROWS:
        x = np.zeros((rows, starts.WIDTH), np.float32)
        compiled = jax.jit(getattr(functions, function)).lower(params, x).compile()
        total += len(pickle.dumps(serialize_executable.serialize(compiled)))
    return total


if __name__ == "__main__":
    print(_serialized(sys.argv[1]))
