"""Examine the build of a library that is installed here, and make its row (`known_builds`): `stagec action examine`.

A program is compiled in fresh processes: twice in circumstances that differ, which must make the same bytes, and with
other seeds of XLA's hash tables, which shows whether they are ours to choose. What is for a CPU is run as well. All of
it takes jaxlib, NumPy and the plugin, and nothing else: so it works with every Python that has wheels of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from stagec.backends import plugins
from stagec.hardware import catalog
from stagec.patches import known_builds
from stagec.patches.known_builds import Build
from stagec.patches.machine_code import PatchError, mapped
from stagec.pjrt import packages

# XLA:CPU hoists the loop, and gives the kernel its arguments in the order of a hash table. It makes the shift, which is
# bound by memory, in the square root of the cores in parts; as gfni has an instruction for it, machines do too.
_LOOP = """
func.func public @main(
  %x: tensor<4xf32>, %a: tensor<4xf32>, %b: tensor<4xf32>, %c: tensor<4xf32>, %d: tensor<5xf32>,
  %bytes: tensor<8000000xui8>
) -> (tensor<4xf32>, tensor<8000000xui8>) {
  %0 = stablehlo.constant dense<0> : tensor<i32>
  %y:6 = stablehlo.while(%xi = %x, %ai = %a, %bi = %b, %ci = %c, %di = %d, %i = %0)
      : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<5xf32>, tensor<i32>
    cond {
      %5 = stablehlo.constant dense<5> : tensor<i32>
      %6 = stablehlo.compare LT, %i, %5, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %6 : tensor<i1>
    } do {
      %5 = stablehlo.multiply %xi, %ai : tensor<4xf32>
      %6 = stablehlo.add %xi, %bi : tensor<4xf32>
      %7 = stablehlo.divide %ci, %6 : tensor<4xf32>
      %8 = stablehlo.subtract %5, %7 : tensor<4xf32>
      %9 = stablehlo.dynamic_slice %di, %i, sizes = [1] : (tensor<5xf32>, tensor<i32>) -> tensor<1xf32>
      %10 = stablehlo.broadcast_in_dim %9, dims = [0] : (tensor<1xf32>) -> tensor<4xf32>
      %11 = stablehlo.add %8, %10 : tensor<4xf32>
      %12 = stablehlo.constant dense<1> : tensor<i32>
      %13 = stablehlo.add %i, %12 : tensor<i32>
      stablehlo.return %11, %ai, %bi, %ci, %di, %13
        : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<5xf32>, tensor<i32>
    }
  %3 = stablehlo.constant dense<3> : tensor<8000000xui8>
  %z = stablehlo.shift_left %bytes, %3 : tensor<8000000xui8>
  return %y#0, %z : tensor<4xf32>, tensor<8000000xui8>
}
"""
# XLA:GPU stores the pairs as a hash table has them.
_PERMUTE = """
module @jit_permute {
  sdy.mesh @mesh = <["d"=8]>
  func.func public @main(
    %x: tensor<16x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"d"}, {}]>}
  ) -> tensor<16x16xf32> {
    %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"d"}, {}]>] out_shardings=[<@mesh, [{"d"}, {}]>]
        manual_axes={"d"} (%y: tensor<2x16xf32>) {
      %1 = "stablehlo.collective_permute"(%y) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7], [7, 0]]> : tensor<8x2xi64>
      } : (tensor<2x16xf32>) -> tensor<2x16xf32>
      sdy.return %1 : tensor<2x16xf32>
    } : (tensor<16x16xf32>) -> tensor<16x16xf32>
    return %0 : tensor<16x16xf32>
  }
}
"""
# The code of libtpu before 0.0.44 follows a hash table here.
_SCATTER = """
func.func public @main(%x: tensor<16x16xf32>, %i: tensor<16xi32>) -> tensor<16x16xf32> {
  %16 = stablehlo.constant dense<16> : tensor<16xi32>
  %0 = stablehlo.constant dense<0> : tensor<16xi32>
  %below = stablehlo.compare LT, %i, %0, SIGNED : (tensor<16xi32>, tensor<16xi32>) -> tensor<16xi1>
  %above = stablehlo.add %i, %16 : tensor<16xi32>
  %rows = stablehlo.select %below, %above, %i : tensor<16xi1>, tensor<16xi32>
  %2 = stablehlo.constant dense<2> : tensor<8xi32>
  %count = stablehlo.iota dim = 0 : tensor<8xi32>
  %columns = stablehlo.multiply %2, %count : tensor<8xi32>
  %3 = stablehlo.broadcast_in_dim %rows, dims = [0] : (tensor<16xi32>) -> tensor<16x8x1xi32>
  %4 = stablehlo.broadcast_in_dim %columns, dims = [1] : (tensor<8xi32>) -> tensor<16x8x1xi32>
  %places = stablehlo.concatenate %3, %4, dim = 2 : (tensor<16x8x1xi32>, tensor<16x8x1xi32>) -> tensor<16x8x2xi32>
  %values = stablehlo.constant dense<3.0> : tensor<16x8xf32>
  %y = "stablehlo.scatter"(%x, %places, %values) <{scatter_dimension_numbers = #stablehlo.scatter<
    inserted_window_dims = [0, 1], scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 2>}> ({
  ^bb0(%old: tensor<f32>, %new: tensor<f32>):
    stablehlo.return %new : tensor<f32>
  }) : (tensor<16x16xf32>, tensor<16x8x2xi32>, tensor<16x8xf32>) -> tensor<16x16xf32>
  return %y : tensor<16x16xf32>
}
"""


@dataclass(frozen=True)
class _Program:
    """A program, its target, the sizes of its mesh, and what its optimized HLO must have."""

    text: str
    target: str
    settings: dict[str, Any]
    mesh: Sequence[int] = ()
    expected: str = ""


_CPU = "neoverse-n1" if os.uname().machine == "aarch64" else "cpu-avx2"
PROGRAMS = {
    "cpu": _Program(_LOOP, _CPU, {"parallelism": 16}, (), '"outer_dimension_partitions":["4"]'),
    "cuda": _Program(_PERMUTE, "h200", {"topology": "1x1x8"}, (8,)),
    "rocm": _Program(_PERMUTE, "mi300x", {"topology": "1x1x8"}, (8,)),
    "tpu": _Program(_SCATTER, "v5e:1x1", {}),
}

_COMPILE = """
import functools, hashlib, json, sys
given = json.loads(sys.argv[1])
if given["another_cpu"]:
    from stagec.backends.cpu import eager
    eager.be_another_machine()
from stagec.core.builds import specs
from stagec.backends import compilation
from stagec.patches import hash_seeds
from stagec.backends.gpu import compiler as gpu
gpu._UNTIMED.clear()  # the program has no product, and XLA stores options: rows are of bytes without
if given["seed"] is not None:
    hash_seeds.patches = functools.partial(hash_seeds.patches, seed=given["seed"])
    gpu._UNORDERED.clear()  # the order is to be seen
target = specs.target_spec(given["target"])
backend = compilation.backend(target.platform)
backend.prepare_process(target)
from jaxlib.mlir import ir
from stagec.stages import mlir
with mlir.make_context():
    made = backend.compile_module(ir.Module.parse(given["module"]), target, given["mesh"])
assert given["expected"] in made.hlo, made.hlo
open("executable", "wb").write(made.executable)
print(hashlib.sha256(made.executable).hexdigest()[:32])
"""
_RUN = """
import numpy as np
from stagec.pjrt import clients, compatibility
from stagec.pjrt.executable import Executable
compatibility.hlo().HloPrintOptions.short_parsable()
values = [np.full(4, x, np.float32) for x in (1, 2, 3, 4)]
values += [np.arange(5, dtype=np.float32), np.arange(8000000).astype(np.uint8)]
specs = [(value.shape, value.dtype) for value in values]
loaded = Executable.load(open("executable", "rb").read(), specs, [specs[0], specs[5]], [], clients.devices())
y, z = (array.numpy() for array in loaded.run([loaded.put(i, value) for i, value in enumerate(values)]))
x, a, b, c, d, shifted = values
for i in range(5):
    x = x * a - c / (x + b) + d[i]
np.testing.assert_allclose(y, x, rtol=1e-5)
np.testing.assert_array_equal(z, shifted << 3)
"""
_SEEDS = (6, 7, 11, 1)


def library(platform: str) -> Path:
    """Return the file of the library that is changed to compile for a platform. Raises PatchError if there is none."""
    if platform != "cpu":
        return plugins.path(plugins.of(platform))
    folder = packages.folder("jaxlib")
    if folder is None:
        raise PatchError("jaxlib is not installed")
    return folder / "libjax_common.so"


def examine(platform: str) -> Build:
    """Return the row of the library that is installed. Raises PatchError if it is not as the known builds."""
    file = library(platform)
    try:
        row = known_builds.examined(file)
    except PatchError:
        with mapped(file) as code:
            known_builds.known(code)  # its error says what still works
        raise
    package, tag = known_builds.package_of(file), known_builds.python_tag()
    row = dataclasses.replace(
        row,
        version=metadata.version(package),
        python=tag if platform == "cpu" else "",
        tested=f"CPython {'.'.join(map(str, sys.version_info[:2]))}{'t' * tag.endswith('t')}",
    )
    digest, follows = made(platform, row)
    return dataclasses.replace(row, made=digest, follows_seed=follows)


def made(platform: str, row: Build) -> tuple[str, bool]:
    """Compile the platform's program; return the start of its SHA-256, and whether its bytes follow the seed.

    row: what is known of the library before. Raises PatchError if two builds differ, or one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        known_builds.write(Path(folder, known_builds.HERE), [row])
        made_here = _compile(platform, folder, {"PYTHONHASHSEED": "0", "TZ": "UTC"}, cores=1, run=platform == "cpu")
        others = {"PYTHONHASHSEED": "7", "TZ": "Asia/Kathmandu", "MALLOC_ARENA_MAX": "1", "X": "x" * 5000}
        made_again = _compile(platform, folder, others, another_cpu=platform == "cpu")
        if made_again != made_here:
            raise PatchError(
                f"two builds of a program with {row.library} {row.build_id} differ: {made_here} and {made_again}"
            )
        first = _compile(platform, folder, {}, seed=0)
        return made_here, any(_compile(platform, folder, {}, seed=seed) != first for seed in _SEEDS)


def _compile(
    platform: str,
    rows: str,
    variables: dict[str, str],
    cores: int | None = None,
    seed: int | None = None,
    run: bool = False,
    another_cpu: bool = False,
) -> str:
    program = PROGRAMS[platform]
    target = dataclasses.replace(catalog.target(program.target), **program.settings)
    given = {
        "target": dataclasses.asdict(target),
        "module": program.text,
        "mesh": program.mesh,
        "expected": program.expected,
        "seed": seed,
        "another_cpu": another_cpu,
    }
    passed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH") if name in os.environ}
    path = os.pathsep.join([*(str(Path(entry).absolute()) for entry in sys.path if entry), rows])
    env = {**passed, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
    said = []
    with tempfile.TemporaryDirectory() as folder:
        for script in (_COMPILE, _RUN) if run else (_COMPILE,):
            done = subprocess.run(
                [sys.executable, "-B", "-s", "-S", "-c", script, json.dumps(given)],
                cwd=folder,
                env=env | {"HOME": folder},
                preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores]),
                check=False,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                last = done.stderr.strip().rpartition("\n")[2] or f"its process ended with status {done.returncode}"
                raise PatchError(f"a program does not compile or run as it should: {last}")
            said.append(done.stdout.strip())
    return said[0]


if __name__ == "__main__":
    try:
        print(json.dumps(dataclasses.asdict(examine(sys.argv[1]))))
    except PatchError as error:
        sys.exit(f"{error}")
