"""One build of the corpus in a process of its own.

`PLATFORM export OUT`, `PLATFORM compile EXPORTED OUT`, or `cpu models OUT`, of the models that compute while they are
imported: as on a machine with another CPU where `stagec reproduce` builds so.

It prints a line for each program: its name, and the digest of what was made of it.

The order of the programs follows PYTHONHASHSEED. With an even number, a fork compiles each; with an odd number, this
process compiles all for a CPU, one after the other. Workers do both (worker/server.py).
"""

import hashlib
import os
import random
import sys
from pathlib import Path

from stagec.core.builds.specs import ExecutableSpec, TargetSpec

TARGETS = """
[manifest]
name = "corpus"
version = "1"

[targets.cpu]
platform = "cpu"
isa = "AVX2"
parallelism = 4

[targets.tpu]
platform = "tpu"
topology = "v5e:2x2"

[targets.cuda]
platform = "cuda"
device = "h100-sxm"
topology = "1x1x4"

[functions.f]
entry = "programs:f"
args = []
targets = ["cpu", "cuda", "tpu"]
"""


def target(platform: str) -> TargetSpec:
    from stagec.manifest import load_manifest, plan

    Path("corpus.toml").write_text(TARGETS)
    specs = [executable.spec.target for executable in plan(load_manifest("corpus.toml")).executables]
    return next(spec for spec in specs if spec.platform == platform)


def shuffled(names: list[str]) -> list[str]:
    order = sorted(names)
    random.Random(int(os.environ["PYTHONHASHSEED"])).shuffle(order)
    return order


def write(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    print(file.stem, hashlib.sha256(data).hexdigest(), flush=True)


def export(platform: str, out: Path, only: list[str]) -> None:
    import jax
    from programs import PROGRAMS

    jax.config.update("jax_traceback_in_locations_limit", 0)  # as stagec.frontends.jax.export does
    for name in shuffled(only or list(PROGRAMS)):
        function, avals = PROGRAMS[name]
        write(
            out / f"{name}.exported",
            bytes(jax.export.export(jax.jit(function), platforms=[platform])(*avals).serialize()),
        )


def compile_all(platform: str, exported: Path, out: Path, only: list[str]) -> None:
    from stagec.backends.compilation import backend

    hardware = target(platform)
    backend(platform).prepare_process(hardware)
    from stagec.building.compilation import compile_exported

    def compile_one(name: str) -> None:
        spec = ExecutableSpec(name, "corpus", hardware, {})
        compiled = compile_exported((exported / f"{name}.exported").read_bytes(), spec)
        write(out / f"{name}.xla", compiled.executable)

    for name in shuffled(only or [file.stem for file in exported.glob("*.exported")]):
        if platform == "cpu" and int(os.environ["PYTHONHASHSEED"]) % 2:
            compile_one(name)
            continue
        child = os.fork()
        if child == 0:
            compile_one(name)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{name} was not compiled")


def build_models(out: Path, only: list[str]) -> None:
    """Export each model in a fork, as a worker does (worker/template.py)."""
    from stagec.backends.cpu import eager
    from stagec.cli import main
    from stagec.cli.actions import export
    from stagec.core.builds.specs import to_json
    from stagec.manifest import load_manifest, plan

    if int(os.environ["PYTHONHASHSEED"]) % 2:  # as `variation` has it for every second build
        eager.be_another_machine()
    export.preload()
    import models

    for name in shuffled(only or list(models.MODELS)):
        file = out / f"model_{name}"
        file.with_suffix(".py").write_text(models.source(name))
        table = f'[functions.f]\nentry = "model_{name}:f"\nargs = ["f32[4]"]\ntargets = ["cpu"]\n'
        table += f"enable_x64 = {str(name in models.X64).lower()}\n"
        file.with_suffix(".toml").write_text(TARGETS.partition("[functions")[0] + table)
        file.with_suffix(".spec").write_text(to_json(plan(load_manifest(f"{file}.toml")).exports[0].spec))
        words = ["--spec", f"{file}.spec", "--output", f"{file}.exported", "--import-root", str(out)]
        child = os.fork()
        if child == 0:
            os._exit(main(["action", "export", *words]))
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{name} was not exported")
        print(name, hashlib.sha256(Path(f"{file}.exported").read_bytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    _, platform, command, *arguments = sys.argv
    if command == "export":
        export(platform, Path(arguments[0]), arguments[1:])
    elif command == "models":
        build_models(Path(arguments[0]), arguments[1:])
    else:
        compile_all(platform, Path(arguments[0]), Path(arguments[1]), arguments[2:])
