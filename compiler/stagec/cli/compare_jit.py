"""Compare the results of a bundle with those of `jax.jit` on the CPU of the target: status 1 where a bit differs."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.cli.files import Answer, Options
from stagec.cli.forks import Forks
from stagec.cli.options import MANIFEST_IMPORT_ROOTS, WEIGHTS, value
from stagec.core.messages.errors import Problem, StagecError, printable

if TYPE_CHECKING:
    from stagec.audit.inputs import Inputs

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "manifest": "its manifest (.toml); functions are traced again, by the JAX of this Python",
    "[function ...]": "functions to compare; of a variant, FUNCTION-VARIANT (default: all)",
    "[--seed SEED]": value("of the random arguments (default: 0)", 0, int),
    **MANIFEST_IMPORT_ROOTS,
    **WEIGHTS,
}


def run(options: Options) -> Answer:
    from stagec.audit import inputs
    from stagec.core.builds.specs import CpuTarget

    options.import_root = options.import_root or ["."]
    rows: list[dict[str, Any]] = []
    # The preload of golden results also has XLA leave out kernels that it uses where a bundle runs.
    tracing = "stagec.backends.cpu.eager:prepare_libraries", "stagec.frontends.common.frontend:preload"
    running = "stagec.loader.load", "stagec.checking.trials"
    with Forks(*tracing, "stagec.frontends.golden_arrays") as jax, Forks(*running) as bundle:
        planned = inputs.read(options.manifest, options.import_root, command=lambda words, _: jax.run(words))
        if planned is None:
            write = "give the .toml that the bundle is made from"
            raise StagecError(Problem(options.manifest, "", "not a manifest", write))
        for name, (export, spec) in planned.executables.items():
            asked = not options.function or export.partition(".")[2] in options.function
            if not (asked and isinstance(spec.target, CpuTarget)):
                continue
            for row in _compared(options, planned, name, (jax, bundle), spec.target.parallelism):
                rows.append(row)
                if not options.json:
                    told = "has the bits of jax.jit" if row["equal"] else "differs from jax.jit"
                    print(printable(f"{row['executable']}: {row['path']} {told}"), flush=True)
    if not rows:
        write = "name functions that have a target for CPUs"
        raise StagecError(Problem(options.bundle, "", "nothing to compare", write))
    return Answer({"kind": "compare-jit", "results": rows}, "", 0 if all(row["equal"] for row in rows) else 1)


def _compared(
    options: Options, planned: Inputs, name: str, sides: tuple[Forks, Forks], threads: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each result of an executable, in order.

    sides: what runs JAX, and what runs the bundle. threads: of both.
    """
    import numpy as np

    from stagec.bundle import safetensors
    from stagec.core.builds import specs
    from stagec.pjrt.arrays import dtype_of

    jax, bundle = sides
    export, spec = planned.executables[name]
    golden = {"bucket": dict(spec.bucket), "seed": options.seed, "inputs": None, "outputs": {}}
    function = dataclasses.replace(planned.exports[export], golden=golden)
    exported, description, _ = planned.portable(export)
    with tempfile.TemporaryDirectory(prefix="stagec") as scratch:
        folder = Path(scratch)
        written = {"spec": specs.to_json(function).encode(), "executable": specs.to_json(spec).encode()}
        for file, content in {**written, "exported": exported, "description": description}.items():
            (folder / file).write_bytes(content)
        words = [f"--{file}={folder / file}" for file in ("spec", "executable", "exported", "description")]
        words += [f"--output={folder / 'golden'}"]
        words += [f"--import-root={root}" for root in options.import_root]
        files = {bound["file"] for bound in function.bind.values()}
        words += [f"--weights={file}={Path(options.manifest).parent / file}" for file in sorted(files)]
        jax.run(["action", "reference", *words])
        tensors = safetensors.read(folder / "golden")
        arrays = {
            path: np.frombuffer(tensor.read(), dtype_of(tensor.aval)).reshape(tuple(map(int, tensor.aval.shape)))
            for path, tensor in tensors.items()
        }
        given = {path: array for path, array in arrays.items() if not path.startswith("result")}
        np.savez(folder / "inputs.npz", **given)  # type: ignore[arg-type]
        words = [options.bundle, export.partition(".")[2], f"--target={spec.target.name}"]
        words += [f"--inputs={folder / 'inputs.npz'}", f"--output={folder / 'results.npz'}"]
        words += [f"--weights={options.weights}"] if options.weights else []
        # Threads decide in which order a convolution adds: as many as the reference has.
        bundle.run(["run", *words], {"NPROC": str(threads)})
        with np.load(folder / "results.npz") as results:
            for path in [path for path in arrays if path not in given]:
                wanted, result = arrays[path], results[path]
                equal = (result.shape, result.tobytes()) == (wanted.shape, wanted.tobytes())
                yield {"executable": name, "path": path, "equal": equal}
