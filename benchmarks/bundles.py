"""Bundles of one function each, built by stagec's commands as Bazel's rules do, and processes that load them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parent.parent
COMPILER = ROOT / "compiler"
EXTENSIONS = [str(path.parent) for path in sorted(COMPILER.glob("extensions/*/stagec_*"))]
ROWS, TARGETS = (1, 8, 32), {"cpu-avx2": "AVX2", "cpu-sse42": "SSE4_2"}


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a child process: this one's packages, and no setting of XLA's or JAX's but `variables`.

    folder: where its byte code lies between runs, as that of an installed package does.
    """
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([*packages, str(ROOT), str(COMPILER), *EXTENSIONS]),
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",  # XLA says at length what of a CPU an executable of JAX's has not been made for
        **variables,
    }


def build(function: str, folder: Path, sized: bool = False, compiler_options: Mapping[str, str] | None = None) -> Path:
    """Build the bundle of one function of `functions.py` in `folder`, a new one; return its path.

    JAX's compilation cache of the same lies in `jax_cache` there.
    sized: for all ROWS and TARGETS; otherwise for one target, and the shapes that the function has.
    compiler_options: of that one target.
    """
    folder.mkdir(parents=True)
    (folder / "functions.toml").write_text(_manifest(function, sized, compiler_options or {}))
    plan = json.loads(_stagec(folder, "action", "plan", "functions.toml", "--json"))
    arguments: list[str] = []
    for artifact in plan["exports"]:
        name, spec = _specified(artifact, folder)
        words = ("--output", f"{name}.exported", "--description", f"{name}.exported.json", "--import-root", str(ROOT))
        _stagec(folder, "action", "export", "--spec", spec, *words)
        arguments += ["--export", f"{name}:{name}.exported:{spec}:{name}.exported.json"]
    for artifact in plan["executables"]:
        name, spec = _specified(artifact, folder)
        words = ("--output", f"{name}.xla", "--description", f"{name}.json", "--module", f"{name}.mlirbc")
        _stagec(folder, "action", "compile", "--spec", spec, "--exported", f"{artifact['export']}.exported", *words)
        arguments += ["--executable", f"{name}:{name}.xla:{name}.json:{name}.mlirbc"]
    cached: list[str] = []
    exports = {artifact["name"]: f"{artifact['name']}.spec" for artifact in plan["exports"]}
    for artifact in plan["executables"]:
        name = artifact["name"]
        words = ("--output", f"{name}.key", "--executable", f"{name}.spec", "--import-root", str(ROOT))
        _stagec(folder, "action", "jax-key", "--spec", exports[artifact["export"]], *words)
        words = ("--key", f"{name}.key", "--output", f"{name}.jax.xla", "--entry", f"{name}.jax.json")
        _stagec(folder, "action", "jax-compile", "--spec", f"{name}.spec", *words)
        cached += ["--entry", f"{name}:{name}.jax.json:{name}.jax.xla"]
    _stagec(folder, "action", "jax-cache", "--output", "jax_cache", *cached)
    _stagec(
        folder, "action", "bundle", "--name", "functions", "--version", "1.0.0", "--output", "functions.aot", *arguments
    )
    return folder / "functions.aot"


def repeat(bundle: Path, count: int, out: Path) -> None:
    """Write a bundle of one function with others like it, `count` in all, each with members of its own.

    The others cannot run: their members are short.
    """
    from stagec.bundle import archive as archives
    from stagec.bundle.members import Content, bundle_members, pieces

    archive = archives.Archive(bundle)
    ((name, function),) = archive.index["functions"].items()
    members: dict[str, Content] = {member: archive[member] for member in archive.index["members"]}
    functions = {name: function}
    for number in range(1, count):
        other = f"{name}_{number}"

        def own(member: str, other: str = other) -> str:
            members[f"{other}.{member}"] = f"{other} {member}".encode()
            return f"{other}.{member}"

        keys = ("executable", "description", "stablehlo")
        executables = [{**entry, **{key: own(entry[key]) for key in keys}} for entry in function["executables"]]
        copied = {**function, "function": other, "executables": executables, "exported": own(function["exported"])}
        functions[other] = {**copied, "description": own(function["description"])}
    with out.open("wb") as file:
        for piece in pieces(bundle_members({**archive.index, "functions": functions}, members)):
            file.write(piece)


def _manifest(function: str, sized: bool, compiler_options: Mapping[str, str]) -> str:
    lines = ["[manifest]", 'name = "functions"', 'version = "1.0.0"', "", f"[functions.{function}]"]
    lines.append(f'entry = "benchmarks.functions:{function}"')
    lines.append(f'avals = "benchmarks.functions:{"sized_" if sized else ""}{function}_avals"')
    if sized:
        lines += [f"buckets.rows = {[*ROWS]}", f"targets = {json.dumps([*TARGETS])}"]
    else:
        lines += ['targets = ["cpu-avx2"]', "", "[targets.cpu-avx2]", 'platform = "cpu"', 'isa = "AVX2"']
        lines += [f"compiler_options.{name} = {json.dumps(value)}" for name, value in compiler_options.items()]
    return "\n".join([*lines, ""])


def _specified(artifact: dict[str, Any], folder: Path) -> tuple[str, str]:
    name: str = artifact["name"]
    (folder / f"{name}.spec").write_text(json.dumps(artifact["spec"]))
    return name, f"{name}.spec"


def _stagec(folder: Path, *arguments: str) -> str:
    """Run a command of stagec; return its stdout. Raises CalledProcessError, after its message on stderr."""
    command = [sys.executable, "-B", "-s", "-S", str(COMPILER / "stagec" / "__main__.py"), *arguments]
    env = environment(folder, OPENBLAS_NUM_THREADS="1", PYTHONHASHSEED="0", PYTHONSAFEPATH="1")
    return subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
