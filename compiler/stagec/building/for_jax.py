"""Build entries of JAX's compilation cache: compile the program in a key, after checking that the key is its name.

A program of `jax.jit` is not the one of the bundle: it has JAX's calling convention, and names of results, which an
exported module has not. So each signature is lowered and compiled once more.

The key comes from an action in which a model ran. JAX takes whatever lies under the name that it looks for. So an entry
gets only the name of what XLA compiled for it: the name's hash is of the module and the options that XLA gets, and of
nothing that stagec did not look at.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from collections.abc import Iterator, Sequence

from jaxlib import _jax, xla_client
from jaxlib.mlir import ir

from stagec.backends import analysis, compilation
from stagec.backends.compilation import CannotCompile, CompiledModule
from stagec.building.compilation import problem
from stagec.core.builds.platforms import GPUS
from stagec.core.builds.specs import CompilerOption, CpuTarget, ExecutableSpec, TargetSpec
from stagec.core.data import wire
from stagec.core.messages.errors import Problem, StagecError
from stagec.jaxcache import jax_entries
from stagec.jaxcache.jax_entries import Entry, Key
from stagec.pjrt import clients, compatibility
from stagec.pjrt.custom_calls import register_custom_calls
from stagec.stages import mlir

_DEBUG_OPTIONS = (3, 3)
"""Fields of CompileOptions, and of its ExecutableBuildOptions: XLA's flags
(https://github.com/openxla/xla/blob/main/xla/pjrt/proto/compile_options.proto)."""
_FLAG = re.compile(r"--(?:xla_dump_large_constants(?:=\w+)?|(xla_tpu_\w+)=(true|false|0|[1-9]\d{0,8}))", re.ASCII)
"""A flag that a program may set, as MaxText does: of dumps, or libtpu's, which names no file, and is an option too.

Elsewhere nothing reads libtpu's: XLA ends a process that has one in XLA_FLAGS, so it is of LIBTPU_INIT_ARGS."""


def compile_for_jax(
    keys: Sequence[Key], spec: ExecutableSpec, machines: Sequence[str]
) -> tuple[CompiledModule, list[Entry]]:
    """Compile the module in a key of JAX's compilation cache; return XLA's result, and the names of its entries.

    keys: of one program, in the ways in which programs call it: they differ in where arguments lie. XLA compiles each
        to the same executable, so stagec compiles only the first.
    machines: fingerprints of the topologies to name it for, 16 hexadecimal digits each. On CPUs there is a name besides
        for every CPU that has the target's instruction set, or every GPU of its kind (`stagec.jax_cache`);
        for TPUs, for the target's own topology.
    The process must have been prepared by the platform's backend. Raises StagecError when it cannot be compiled, and
    for a key that is not the one of its program.
    """
    target, first = spec.target, keys[0]
    backend = compilation.backend(target.platform)
    with mlir.context():
        if fault := _fault(keys, target):
            what = f"what JAX looks {spec.key} up by is not right: {fault}"
            raise StagecError(Problem(spec.manifest, "jax_cache", what, "let stagec action jax-key write it again"))
        module = _parsed(first)
        if target.platform == "cpu":
            register_custom_calls(mlir.custom_calls(module))
        try:
            chosen = {"ids": first.ids} if first.ids else {}
            # An option of a program comes before the process's flag in XLA too.
            told = dataclasses.replace(
                target, compiler_options={**_of_libtpu(first, target), **target.compiler_options}
            )
            compiled = backend.compile_module(module, told, first.mesh, first.parts[jax_entries.OPTIONS], **chosen)
        except CannotCompile as error:
            raise problem(error, spec) from error
    if target.platform != "cpu" and not compiled.devices:
        what = f"JAX {compatibility.version()} looks programs up by the ROCm where they run, and a build has none"
        write = "build with jax, jaxlib and jax-rocm7-pjrt 0.11.0 or older, or without JAX's cache"
        raise StagecError(Problem(spec.manifest, "jax_cache", what, write))
    topologies = {machine: jax_entries.fingerprint(machine) for machine in machines}
    if isinstance(target, CpuTarget):
        topologies = {f"any CPU with {target.isa}": jax_entries.any_cpu(target.isa), **topologies}
    elif target.platform in GPUS:
        kind = backend.hardware(target).device_kind
        topologies = {f"any {kind}": jax_entries.any_device(kind), **topologies}
    else:
        topologies = {target.name: compiled.devices[jax_entries.TOPOLOGY], **topologies}
    named = [_on_devices(key.with_parts(compiled.devices), target.platform, compiled.device_ids) for key in keys]
    purpose = spec.function, spec.variant, target.name, spec.bucket
    return compiled, [jax_entries.entry(key, topologies, *purpose) for key in named]


def costs(compiled: CompiledModule, target: TargetSpec) -> str:
    """Return what a report says of an executable, as JSON: `analysis.of_module`, its "size", and "avoided" defects."""
    hardware = compiled.hardware or compilation.backend(target.platform).hardware(target)
    sizes = {"size": len(compiled.executable), "avoided": compiled.avoided}
    return json.dumps({**sizes, **analysis.of_module(compiled, hardware)}, indent=1) + "\n"


def _parsed(key: Key) -> ir.Module:
    return ir.Module.parse(key.parts[jax_entries.MODULE])


def _fault(keys: Sequence[Key], target: TargetSpec) -> str:
    """Return the first fault of keys that are to name one executable; "" if there is none."""
    try:
        if fault := next((fault for key in keys for fault in _faults(key, target)), ""):
            return fault
        if len(keys) > 1 and len({*map(_program, keys)}) > 1:
            return "its keys are of several programs"
    except (ir.MLIRError, _jax.JaxRuntimeError, CannotCompile, KeyError, OverflowError, ValueError) as error:
        return f"it cannot be read: {error}"
    return ""


def _faults(key: Key, target: TargetSpec) -> Iterator[str]:
    """Yield what of a key is not so in the program that `compile_module` compiles for it, or is not JAX's."""
    called = ir.StringAttr(_parsed(key).operation.attributes["sym_name"]).value
    if called != key.module:
        yield f"the module {called} is named {key.module}"
    if key.parts[jax_entries.JAXLIB] != compatibility.version().encode():
        yield f"it is of another jaxlib than {compatibility.version()}"
    # A flag may name a file to write, and it came from a process in which a model ran.
    if said := "".join(flag for flag in _flags(key) if not _FLAG.fullmatch(flag)):
        yield f"XLA_FLAGS or LIBTPU_INIT_ARGS was {said} where the model ran; write the target's compiler_options"
    # Which of two values libtpu took was in their order, and JAX sorts them.
    names = [flag.partition("=")[0] for flag in sorted({*_flags(key)})]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        yield f"{twice} had two values in LIBTPU_INIT_ARGS or XLA_FLAGS where the model ran; give it once"
    if key.parts[jax_entries.HOOK]:
        yield "its model added something by a hook of JAX"
    serialized, count = key.parts[jax_entries.OPTIONS], math.prod(key.mesh)
    options = xla_client.CompileOptions.ParseFromString(serialized)
    if (options.num_replicas, options.num_partitions) != (1, count):
        yield f"it is for {options.num_replicas * options.num_partitions} devices, and the mesh has {count}"
    elif key.ids and (target.platform != "tpu" or len({*key.ids}) != count or len(key.ids) != count):
        yield f"it is for the TPUs {key.ids}, and the mesh has {count} devices of {target.platform}"
    elif (
        compilation.compile_options(key.ids or range(count), target.compiler_options, serialized).SerializeAsString()
        != serialized
    ):
        yield "its options are not the target's compiler_options"
    # Options of XLA that are strings name files to read or write, and a model may have set them.
    if _texts(serialized) - _texts(_own_options()) - {b""}:
        yield "it sets options of XLA that may name files"


def _flags(key: Key) -> list[str]:
    """Return the flags in a key: JAX hashes them sorted, in a row."""
    return list(filter(None, re.split("(?=--)", key.parts[jax_entries.FLAGS].decode(errors="replace"))))


def _of_libtpu(key: Key, target: TargetSpec) -> dict[str, CompilerOption]:
    """Return what a key's flags change of an executable, as options of XLA."""
    flags = (_FLAG.fullmatch(flag) for flag in _flags(key) if flag != jax_entries.TPU_FLAG)
    return {flag[1]: json.loads(flag[2]) for flag in flags if flag and flag[1]} if target.platform == "tpu" else {}


def _own_options() -> bytes:
    """Return the options of this process, which has no flags, with the only text that JAX's own settings may add."""
    options = clients.compile_options([0])
    before: bytes = options.SerializeAsString()
    options.executable_build_options.debug_options.xla_disable_hlo_passes = "rematerialization"
    return before + bytes(options.SerializeAsString())


def _texts(options: bytes) -> set[bytes]:
    """Return the flags in CompileOptions that are strings or messages, each with its field."""
    flags = (record for debug in wire.find(options, _DEBUG_OPTIONS) for record in wire.records(debug))
    return {b"%d=%s" % (flag.field, flag.payload) if flag.payload else b"" for flag in flags if flag.wire_type == 2}


def _program(key: Key) -> tuple[object, ...]:
    """Return the program of a key; on one device, without the marks of arguments that lie on it.

    JAX splits such an argument over a mesh without axes, and then XLA may not split it otherwise.
    """
    module = _parsed(key)
    for operation in list(module.body.operations) if math.prod(key.mesh) == 1 else ():
        if operation.operation.name == "sdy.mesh" and operation.attributes["sym_name"] == ir.StringAttr.get(_NOWHERE):
            operation.operation.erase()
        elif "arg_attrs" in operation.attributes:
            rows = map(ir.DictAttr, ir.ArrayAttr(operation.attributes["arg_attrs"]))
            kept = [
                ir.DictAttr.get(
                    {
                        named.name: named.attr
                        for named in map(row.__getitem__, range(len(row)))
                        if not _is_mark(named.attr)
                    }
                )
                for row in rows
            ]
            operation.attributes["arg_attrs"] = ir.ArrayAttr.get(kept)
            if not any(map(len, kept)):
                del operation.attributes["arg_attrs"]
    program = io.BytesIO()
    module.operation.write_bytecode(program)
    options = xla_client.CompileOptions.ParseFromString(key.parts[jax_entries.OPTIONS])
    options.executable_build_options.allow_spmd_sharding_propagation_to_parameters = []
    return program.getvalue(), options.SerializeAsString(), key.parts[jax_entries.FLAGS], tuple(key.mesh)


_NOWHERE = "empty_mesh"
"""JAX's name for a mesh without axes."""


def _is_mark(attribute: ir.Attribute) -> bool:
    return str(attribute).startswith(f"#sdy.sharding<@{_NOWHERE},")


def _on_devices(key: Key, platform: str, device_ids: Sequence[int]) -> Key:
    """Return a key with the flag of TPUs, and a topology's devices in its options. JAX leaves those of GPUs out."""
    if platform != "tpu":
        return key
    options = xla_client.CompileOptions.ParseFromString(key.parts[jax_entries.OPTIONS])
    options.device_assignment = clients.compile_options(device_ids).device_assignment
    flags, own = _flags(key), jax_entries.TPU_FLAG
    flags += [own] if not any(flag.startswith(own.partition("=")[0]) for flag in flags) else []
    said = "".join(sorted(flags)).encode()
    return key.with_parts({jax_entries.FLAGS: said, jax_entries.OPTIONS: options.SerializeAsString()})
