"""Compile for TPUs and NVIDIA devices in fresh processes, without JAX, as the compile command will."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stagec.hardware import catalog
from stagec.pjrt import packages
from tests.building import COMPILER

_COMPILE = """
import json, sys
given = json.loads(sys.argv[1])
from stagec.core.builds import specs
from stagec.backends import compilation
target = specs.target_spec(given["target"])
backend = compilation.backend(target.platform)
backend.prepare_process(target)
from jaxlib.mlir import ir
from stagec.stages import mlir
try:
    device = backend.hardware(target).device_kind
    with mlir.make_context():
        module = ir.Module.parse(given["module"])
        made = backend.compile_module(module, target, given["mesh"])
except compilation.CannotCompile as error:
    print(json.dumps({"refused": [str(error), error.key, error.write]}))
else:
    open(given["output"], "wb").write(made.executable)
    result = {"cost": made.cost_analysis, "memory": made.memory_analysis, "hlo": made.hlo, "device": device}
    placed = {"device_ids": list(made.device_ids), "coords": list(made.coords)}
    print(json.dumps({**result, **placed, "jax": "jax" in sys.modules}))
"""


@dataclass(frozen=True)
class Made:
    """What a process made: an executable and what is known of it, or why it was refused (what, key, what to write)."""

    executable: bytes = b""
    cost: Mapping[str, float] | None = None
    memory: Mapping[str, int] | None = None
    hlo: str = ""
    device: str = ""
    device_ids: Sequence[int] = ()
    coords: Sequence[Sequence[int]] = ()
    jax: bool = False
    refused: tuple[str, str, str] = ("", "", "")

    @property
    def sha256(self) -> str:
        """Digest of the executable."""
        return hashlib.sha256(self.executable).hexdigest()


def installed(**wheels: str) -> pytest.MarkDecorator:
    """Mark tests that are skipped where wheels are missing; each is given with a package that it brings.

    With STAGEC_PLUGINS in the environment they must not be missing, and the tests run.
    """
    missing = [name for name, package in wheels.items() if packages.folder(package) is None]
    return pytest.mark.skipif(
        bool(missing) and "STAGEC_PLUGINS" not in os.environ, reason=f"not installed: {', '.join(missing)}"
    )


def compile_again(
    out: Path,
    platform: str,
    target: str,
    module: str,
    mesh: Sequence[int] = (),
    *,
    topology: str = "1x1x1",
    host: str = "",
    slices: int = 1,
    compiler_options: Mapping[str, Any] | None = None,
    autotuning: str = "",
    env: Mapping[str, str] | None = None,
    cores: frozenset[int] | None = None,
    under: Sequence[str] = (),
) -> Made:
    """Compile `module` in a process whose working directory is `out`; `env` and `cores` are the process's own.

    under: the command that starts it, for example unshare with its options.
    """
    changed: dict[str, Any] = {"compiler_options": dict(compiler_options or {})}
    if platform == "tpu":
        changed |= {"chips_per_host": host, "slices": slices}
    else:
        changed |= {"topology": topology, "autotuning_results": autotuning}
    given = {
        "target": dataclasses.asdict(dataclasses.replace(catalog.target(target), **changed)),
        "module": module,
        "mesh": list(mesh),
        "output": str(out / "executable"),
    }
    done = run(_COMPILE, json.dumps(given), cwd=out, env=env, cores=cores, under=under)
    assert done.returncode == 0, done.stderr
    # jaxlib tells on stderr which plugin it found, whatever its log level.
    result = json.loads(done.stdout)
    if "refused" in result:
        return Made(refused=tuple(result["refused"]))
    return Made((out / "executable").read_bytes(), **result)


def compile_elsewhere(out: Path, *words: Any, env: Mapping[str, str], **more: Any) -> Made:
    """Compile as `compile_again`, and again in another folder, with another home and on one core; compare all bytes.

    env: other variables that the compiler might read.
    """
    here, there = out / "here", out / "another" / "folder"
    here.mkdir()
    there.mkdir(parents=True)
    others = {"HOME": str(there), "TMPDIR": str(there), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    others |= {"XLA_FLAGS": f"--xla_dump_to={there / 'dump'}", **env}
    first = compile_again(here, *words, **more)
    core = frozenset({max(os.sched_getaffinity(0))})
    second = compile_again(there, *words, **more, env=others, cores=core)
    assert first.refused == ("", "", "")
    assert first.executable == second.executable
    assert first.hlo == second.hlo
    assert [path.name for path in there.iterdir()] == ["executable"]
    return first


def run(
    script: str,
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    cores: frozenset[int] | None = None,
    under: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh process that finds stagec and the packages of this one."""
    environment = {
        **{name: value for name, value in os.environ.items() if name.startswith(("LD_", "PATH"))},
        "PYTHONPATH": os.pathsep.join([*sys.path, str(COMPILER)]),
        **(env or {}),
    }

    # It does so itself: a process with threads, as one that has used JAX, may run nothing between fork and exec.
    pin = f"import os\nos.sched_setaffinity(0, {set(cores)})\n" if cores else ""
    command = [*under, sys.executable, "-B", "-c", pin + script, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def layer(mesh: Mapping[str, int] | None = None, rows: int = 256, dtype: str = "f32") -> str:
    """A dense layer with tanh, `[rows, 512] @ [512, 512]`, as StableHLO.

    mesh: its first axis splits the rows, its last one the contracted dimension, so the parts must be added up.
    """
    x, w, y = f"tensor<{rows}x512x{dtype}>", f"tensor<512x512x{dtype}>", f"tensor<{rows}x512x{dtype}>"
    declared, inputs, weights, outputs = "", "", "", ""
    if mesh:
        axes = ", ".join(f'"{name}"={size}' for name, size in mesh.items())
        first, last = next(iter(mesh)), list(mesh)[-1]
        declared = f"sdy.mesh @mesh = <[{axes}]>"
        inputs = f'{{sdy.sharding = #sdy.sharding<@mesh, [{{"{first}"}}, {{"{last}"}}]>}}'
        weights = f'{{sdy.sharding = #sdy.sharding<@mesh, [{{"{last}"}}, {{}}]>}}'
        outputs = f'{{sdy.sharding = #sdy.sharding<@mesh, [{{"{first}"}}, {{}}]>}}'
    return f"""
module @jit_layer attributes {{mhlo.num_partitions = {math.prod((mesh or {}).values())} : i32}} {{
  {declared}
  func.func public @main(%x: {x} {inputs}, %w: {w} {weights}) -> ({y} {outputs}) {{
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : ({x}, {w}) -> {y}
    %1 = stablehlo.tanh %0 : {y}
    return %1 : {y}
  }}
}}
"""


OVERLAPPING = """
module @jit_two attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @mesh = <["data"=4, "model"=2]>
  func.func public @main(
    %x: tensor<256x512xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"model"}]>},
    %w: tensor<512x512xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {}]>},
    %v: tensor<512x512xf32>
  ) -> (tensor<256x512xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}, tensor<512x512xf32>) {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<256x512xf32>, tensor<512x512xf32>) -> tensor<256x512xf32>
    %1 = stablehlo.tanh %0 : tensor<256x512xf32>
    %2 = stablehlo.dot_general %v, %v, contracting_dims = [1] x [0]
      : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
    %3 = stablehlo.dot_general %2, %v, contracting_dims = [1] x [0]
      : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
    return %1, %3 : tensor<256x512xf32>, tensor<512x512xf32>
  }
}
"""
"""A layer on a mesh of 4 by 2 devices, and products that can be computed while its parts are added up."""

CUSTOM_CALL = """
module @jit_call {
  func.func public @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
    %0 = stablehlo.custom_call @lapack_spotrf_ffi(%x) {api_version = 4 : i32} : (tensor<8x8xf32>) -> tensor<8x8xf32>
    return %0 : tensor<8x8xf32>
  }
}
"""
"""A function that only CPUs have."""
