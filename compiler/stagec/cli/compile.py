"""Compile an exported artifact for a target."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.cli.files import Options, read, read_text, write_whole
from stagec.cli.options import value
from stagec.core.builds.specs import ExecutableSpec, executable_spec
from stagec.core.messages import phases
from stagec.core.messages.errors import StagecError, blaming

if TYPE_CHECKING:
    from stagec.stages.compiled import Compiled

OPTIONS = {
    "--spec SPEC": "the executable's spec, a JSON file",
    "(--exported EXPORTED | --jax-key JAX_KEY)": (
        "the exported artifact to compile",
        "what JAX compiles, in its place: the file that stagec export wrote",
    ),
    "[--lowered LOWERED]": "what JAX lowered for devices, beside it: the file that stagec export wrote",
    "[--output OUTPUT]": "where to write the executable",
    "[--description DESCRIPTION]": "where to write its description, a JSON file",
    "[--module MODULE]": "where to write the module for this target and bucket, a portable artifact",
    "[--inventory INVENTORY]": "where to write its arrays, operations, exchanges and limits, a JSON file",
    "[--components COMPONENTS]": "where to write what it is made from, as JSON; this compiles nothing",
    "[--stablehlo STABLEHLO]": "where to write it as StableHLO text",
    "[--hlo-before HLO_BEFORE]": "where to write it as HLO text, before XLA optimizes it",
    "[--hlo-after HLO_AFTER]": "where to write it as HLO text, after that; within its limits or not",
    "[--hlo-proto HLO_PROTO]": "where to write that as XLA's HloModuleProto, with the elements of constants",
    "[--ptx PTX]": "where to write its kernels for NVIDIA devices as PTX, of which XLA makes code",
    "[--jax-entry JAX_ENTRY]": "where to write the names that it has in JAX's compilation cache, as JSON",
    "[--machine FINGERPRINT]...": "a machine to name it for there: what python -m stagec.jax_cache prints",
    "[--label LABEL]": value("what messages call it: the label of a Bazel target", ""),
}


def preload() -> None:
    import stagec.building.compilation
    import stagec.stages.compiling
    import stagec.stages.serialization  # noqa: F401
    from stagec.backends.cpu import compiler as cpu

    cpu.find_code()


def run(options: Options) -> None:
    from stagec.backends.compilation import backend

    spec = executable_spec(read_text(options.spec))
    serialized = read(options.exported or options.jax_key)
    lowered_for = read(options.lowered) if options.lowered else b""
    backend(spec.target.platform).prepare_process(spec.target)  # before anything of jaxlib's is imported
    try:
        if options.jax_key:
            _write_entry(options, spec, serialized)
            return
        if options.components:
            from stagec.building.compilation import made_from

            write_whole(options.components, json.dumps(made_from(serialized, spec, lowered_for)).encode())
            return
        _write_texts(options, spec, serialized, lowered_for)
        if options.output or options.description or options.module:
            _write_executable(options, spec, serialized, lowered_for)
    except StagecError as error:
        raise error.of(options.label) from error


def _write_entry(options: Options, spec: ExecutableSpec, serialized: bytes) -> None:
    from stagec.building.for_jax import compile_for_jax
    from stagec.jaxcache import jax_entries

    with blaming(options.jax_key, "let stagec export write it again", "not a key of JAX's compilation cache: "):
        keys = jax_entries.Key.read(serialized)
    executable, entries = compile_for_jax(keys, spec, options.machine)
    write_whole(options.output, executable)
    write_whole(options.jax_entry, jax_entries.to_json(entries).encode())


def _write_texts(options: Options, spec: ExecutableSpec, serialized: bytes, lowered_for: bytes) -> None:
    with phases.phase("import"):
        from stagec.building import compilation

    if options.stablehlo or options.hlo_before:
        _, lowered = compilation.lower(serialized, spec, lowered_for)
        _write(options.stablehlo, lambda: lowered.as_text("stablehlo").encode())
        _write(options.hlo_before, lambda: lowered.as_text("hlo").encode())
    if options.hlo_after or options.hlo_proto or options.ptx:
        compiled, ptx = _optimized(compilation.optimize, serialized, spec, lowered_for)
        _write(options.hlo_after, lambda: compiled.as_text().encode())
        _write(options.hlo_proto, compiled.optimized.as_serialized_hlo_module_proto)
        _write(options.ptx, ptx.encode)


def _write(path: str | None, content: Callable[[], bytes | None]) -> None:
    """Write a requested file, unless there is nothing to write."""
    data = content() if path else None
    if path and data is not None:
        write_whole(path, data)


def _optimized(
    optimize: Callable[..., Compiled], serialized: bytes, spec: ExecutableSpec, lowered_for: bytes
) -> tuple[Compiled, str]:
    """Return what XLA makes of a program, and its kernels as PTX: "" for other platforms, or where XLA makes none."""
    if spec.target.platform != "cuda":
        return optimize(serialized, spec, lowered_for), ""
    with tempfile.TemporaryDirectory(prefix="stagec-") as scratch:
        dumped = {**spec.target.compiler_options, "xla_dump_to": scratch, "xla_dump_hlo_as_proto": False}
        target = dataclasses.replace(spec.target, compiler_options=dumped)
        compiled = optimize(serialized, dataclasses.replace(spec, target=target), lowered_for)
        # Threads make them, in no order; where there is no more to make, a module is empty.
        return compiled, "\n".join(sorted(filter(None, (path.read_text() for path in Path(scratch).glob("*.ptx")))))


def _write_executable(options: Options, spec: ExecutableSpec, serialized: bytes, lowered_for: bytes) -> None:
    with phases.phase("import"):
        from stagec.building import inventory
        from stagec.building.compilation import compile_exported, notice
        from stagec.building.limits import advice

    started = time.monotonic()
    compiled = compile_exported(serialized, spec, lowered_for, bool(options.inventory))
    for warning in filter(None, (notice(compiled, spec), advice(spec, time.monotonic() - started))):
        print(dataclasses.replace(warning, label=options.label), file=sys.stderr)
    items = compiled.inventory
    _write(options.output, lambda: compiled.executable)
    _write(options.description, lambda: compiled.description.to_json().encode())
    _write(options.inventory, lambda: None if items is None else inventory.to_json(items).encode())
    _write(options.module, lambda: compiled.stablehlo)
    if options.json:
        sys.stdout.write(compiled.description.to_json())
