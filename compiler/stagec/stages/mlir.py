"""MLIR modules with jaxlib's own bindings: the dialects of a JAX module, and its serialized forms."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator

from jaxlib import _jax
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import (
    builtin,  # noqa: F401 - jaxlib imports it when the first module is read: in each fork of a worker
    sdy,
    stablehlo,
)

from stagec.pjrt import compatibility, dialects
from stagec.pjrt.custom_calls import provider

make_context = dialects.make_context
_VERSION = re.compile(rb"ML\xefR.StableHLO_v(\d+\.\d+\.\d+)\0", re.DOTALL)
"""The version of a portable artifact, which follows MLIR's magic number (https://openxla.org/stablehlo/bytecode)."""

_REFUSED = re.compile(r'explicitly marked illegal: [^"\n]*"(vhlo\.\w+)"[^\n]* : (\([^\n]*)')
"""What MLIR says of an operation that has no form in the version asked for."""


@contextlib.contextmanager
def context() -> Iterator[ir.Context]:
    """Be in the context of the `with` statement around this one, or else in a new one.

    To make one takes 5 ms, as long as to read a small module.
    """
    if ir.Context.current:
        yield ir.Context.current
    else:
        with make_context() as made:
            yield made


class TooNew(ValueError):
    """A portable artifact has a later StableHLO version than this jaxlib."""


def read_artifact(context: ir.Context, artifact: bytes) -> ir.Module:
    """Read a VHLO portable artifact (`Exported.mlir_module_serialized`).

    Raises ValueError when it is not one; TooNew if its version is too new.
    """
    if made := _VERSION.match(artifact):
        version, here = made[1].decode(), stablehlo.get_current_version()
        if _numbers(version) > _numbers(here):
            raise TooNew(f"it uses StableHLO {version}, and jaxlib {compatibility.version()} reads {here} and older")
    try:
        return stablehlo.deserialize_portable_artifact(context, artifact)
    except Exception as error:  # jaxlib raises RuntimeError or MLIRError, by version
        raise ValueError(f"not a StableHLO portable artifact: {error}") from error


def not_newer(artifact: bytes, version: str) -> bytes:
    """Return a portable artifact in this version of StableHLO; one that is not newer, as it is.

    JAX writes what a jaxlib of four weeks before reads, and an older one refuses that.
    Raises ValueError for an operation that has no form in that version: it names the operation and its types.
    """
    made = _VERSION.match(artifact)
    if made is None or _numbers(made[1].decode()) <= _numbers(version):
        return artifact
    with context() as current:
        module = read_artifact(current, artifact)
        try:
            return bytes(_jax.mlir.serialize_portable_artifact(module, version, True))
        except Exception as error:  # jaxlib raises ValueError, RuntimeError or MLIRError, by version
            refused = _REFUSED.search(str(error))
            raise ValueError(f"{refused[1]} of {refused[2]}" if refused else str(error)) from error


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def to_bytecode(module: ir.Module) -> bytes:
    """Return the module in MLIR's bytecode form."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def to_portable(bytecode: bytes) -> bytes:
    """Return a StableHLO module in MLIR's bytecode form as a portable artifact, without locations.

    Its version is the newest that a StableHLO of twelve weeks before this jaxlib's reads, as `jax.export` chooses it
    (https://openxla.org/stablehlo/compatibility). Other dialects (Shardy's shardings) stay as they are.
    """
    with context():
        module = ir.Module.parse(bytecode)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        requirement = stablehlo.StablehloCompatibilityRequirement.WEEK_12
        version = stablehlo.get_version_from_compatibility_requirement(requirement)
        return bytes(_jax.mlir.serialize_portable_artifact(module, version, True))


def main_function(module: ir.Module) -> ir.OpView:
    """Return the module's entry point. Raises ValueError when there is none."""
    for operation in module.body.operations:
        if ir.StringAttr(operation.attributes["sym_name"]).value == "main":
            return operation
    raise ValueError("the module has no function named main")


def mesh(module: ir.Module) -> dict[str, int] | None:
    """Return name and size of each axis of the first mesh that the module declares; None without one.

    A module with a mesh has Shardy's shardings, one without has those of XLA's older partitioner.
    """
    for operation in module.body.operations:
        if operation.operation.name == "sdy.mesh":
            axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(operation.attributes["mesh"]).axes)
            return {axis.name: axis.size for axis in axes}
    return None


def operations(module: ir.Module, prefix: str) -> list[ir.Operation]:
    """Return the operations with a name that starts with `prefix`, such as "chlo.", in the order of the module."""
    matching: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name.startswith(prefix):
            matching.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return matching


def custom_calls(module: ir.Module) -> set[str]:
    """Return the targets of the custom calls in a module."""
    calls = operations(module, "stablehlo.custom_call")
    return {ir.StringAttr(call.attributes["call_target_name"]).value for call in calls}


def inventory(artifact: bytes) -> dict[str, str]:
    """Return each custom call of a portable artifact with its class (stagec/pjrt/custom_calls.py), sorted."""
    if b"custom_call" not in artifact:  # MLIR's bytecode has the name of each operation as it is
        return {}
    with context() as current:
        return {name: provider(name) for name in sorted(custom_calls(read_artifact(current, artifact)))}


def argument_names(serialized: bytes, count: int) -> list[str]:
    """Return the names of a module's last `count` arguments: JAX's, such as "params['w']"; "" if it has none."""
    with context() as current:
        module = read_artifact(current, serialized)
        result = [""] * count
        for function in module.body.operations:
            # Of a module with symbolic dimensions, main calls the function that JAX made.
            if re.search(r'"(main|_wrapped_jax_export_main)"', str(function.attributes["sym_name"])):
                arguments = list(function.regions[0].blocks[0].arguments)
                names = [re.fullmatch(r'loc\("(.*)"\)', str(argument.location)) for argument in arguments]
                last = [name[1] if name else "" for name in names[len(names) - count :]]
                result = last if len(last) == count and any(last) else result
    return result
