"""One build of the corpus in a process of its own: `export OUT`, or `compile EXPORTED OUT`; prints a line a program.

The order of the programs follows PYTHONHASHSEED. A program is compiled in a fork of its own, as the compile command
compiles in a process of its own: XLA numbers the modules of a process, and stores the number.
"""

import hashlib
import os
import random
import sys
from pathlib import Path

from stagec.specs import ExecutableSpec, TargetSpec

TARGET = TargetSpec("cpu", "cpu", "AVX2", 4, {})


def shuffled(names: list[str]) -> list[str]:
    order = sorted(names)
    random.Random(int(os.environ["PYTHONHASHSEED"])).shuffle(order)
    return order


def write(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    print(file.stem, hashlib.sha256(data).hexdigest(), flush=True)


def export(out: Path, only: list[str]) -> None:
    import jax
    from programs import PROGRAMS

    jax.config.update("jax_traceback_in_locations_limit", 0)  # as stagec.frontends.jax does
    for name in shuffled(only or list(PROGRAMS)):
        function, avals = PROGRAMS[name]
        write(out / f"{name}.exported", bytes(jax.export.export(jax.jit(function))(*avals).serialize()))


def compile_all(exported: Path, out: Path, only: list[str]) -> None:
    from stagec.backends import cpu

    cpu.pin_process(TARGET)
    from stagec.stages.compiled import compile_exported

    for name in shuffled(only or [file.stem for file in exported.glob("*.exported")]):
        child = os.fork()
        if child == 0:
            spec = ExecutableSpec(name, "corpus", TARGET, {})
            compiled = compile_exported((exported / f"{name}.exported").read_bytes(), spec)
            write(out / f"{name}.xla", compiled.executable)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{name} was not compiled")


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(Path(sys.argv[2]), sys.argv[3:])
    else:
        compile_all(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
