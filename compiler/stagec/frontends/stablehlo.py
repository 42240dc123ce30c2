"""The StableHLO frontend: a module that another framework wrote becomes an `Exported` like any other, without JAX.

The module's function `main` defines the arguments and results: a flat list of arrays of static shape.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxlib import _jax
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import func, stablehlo

from stagec.core.builds.specs import FunctionSpec
from stagec.core.sizes.avals import DTYPES, Aval, mlir_name
from stagec.core.trees.tree import LEAF, Tree
from stagec.frontends.common.frontend import Export, NamedArray, versions as versions
from stagec.pjrt import custom_calls
from stagec.stages import mlir
from stagec.stages.exported import Exported

_CALLING_CONVENTION = 10
"""The version of the calling convention for modules: the pinned JAX's."""

_DTYPES = {
    mlir_name(name): name
    for name, dtype in DTYPES.items()
    if dtype.bits not in (0, 1, 2, 6) and not name.startswith("key<")
}
"""Our dtypes by MLIR's names for them."""


def export(spec: FunctionSpec, import_roots: Sequence[str]) -> Export:
    """Return the StableHLO file that `spec.entry` names as an artifact: one module for all devices.

    Raises StagecError when the file is not there, does not parse or has no `main`.
    """
    with mlir.make_context() as context, ir.Location.unknown(context):
        module = _read(context, spec, import_roots)
        main = _main(module, spec)
        types = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        in_avals = tuple(_aval(spec, kind, f"argument {i}") for i, kind in enumerate(types.inputs))
        out_avals = tuple(_aval(spec, kind, f"result {i}") for i, kind in enumerate(types.results))
        disabled = _allowed(spec, module)
        if len(spec.platforms) > 1:
            _take_platform_index(module, main)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        version = stablehlo.get_version_from_compatibility_requirement(
            stablehlo.StablehloCompatibilityRequirement.WEEK_4
        )
        artifact = _jax.mlir.serialize_portable_artifact(module, version, True)
    out_tree = LEAF if len(out_avals) == 1 else Tree("tuple", (LEAF,) * len(out_avals))
    exported = Exported(
        fun_name=Path(spec.entry).stem,
        in_tree=Tree("tuple", (Tree("tuple", (LEAF,) * len(in_avals)), Tree("dict"))),
        in_avals=in_avals,
        out_tree=out_tree,
        out_avals=out_avals,
        nr_devices=1,
        platforms=tuple(spec.platforms),
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=disabled,
        mlir_module_serialized=artifact,
        calling_convention_version=_CALLING_CONVENTION,
        module_kept_var_idx=tuple(range(len(in_avals))),
        uses_global_constants=len(spec.platforms) > 1,
        _in_shardings=(None,) * len(in_avals),
        _out_shardings=(None,) * len(out_avals),
    )
    return Export(exported.serialize())


def export_with_locations(spec: FunctionSpec, import_roots: Sequence[str]) -> str:
    """Return the module as StableHLO text, with the source locations in its file."""
    with mlir.make_context() as context:
        text = str(_read(context, spec, import_roots).operation.get_asm(enable_debug_info=True))
    # MLIR's name for a string that it parsed.
    return text.replace('loc("-":', f'loc("{(Path(spec.manifest).parent / spec.entry).as_posix()}":')


def jaxpr(spec: FunctionSpec, import_roots: Sequence[str]) -> str:
    """Raise StagecError: JAX did not trace the module."""
    raise spec.problem("entry", f"{spec.entry} is a StableHLO module, and has no jaxpr")


def parameters(spec: FunctionSpec, import_roots: Sequence[str]) -> list[str]:
    """Return no names: the arguments of a module have positions alone."""
    return []


def named_arrays(spec: FunctionSpec, least: int) -> Iterator[NamedArray]:
    """Yield nothing: a module's constants have no names."""
    yield from ()


def results(
    spec: FunctionSpec, import_roots: Sequence[str], serialized: bytes, values: Sequence[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    """Return the result of a call of the artifact: JAX's, or stagec's if JAX is not installed.

    Nothing was traced that it could be compared with.
    """
    if importlib.util.find_spec("jax") is None:
        result = Exported.deserialize(serialized).call(*values)
        return list(map(np.asarray, result if isinstance(result, tuple) else (result,)))
    import jax  # as another process would call it; nothing else here needs JAX
    import jax.export

    from stagec.frontends.jax import evaluation

    def reference() -> tuple[Callable[..., Any], Any]:
        jax.config.update("jax_enable_x64", True)  # a module has the dtypes that it has
        portable = jax.export.deserialize(bytearray(serialized))
        return portable.call, portable.in_tree

    return evaluation.results(serialized, values, reference)


def _read(context: ir.Context, spec: FunctionSpec, roots: Sequence[str]) -> ir.Module:
    file = Path(spec.manifest).parent / spec.entry
    path = next((p for root in roots if (p := Path(root, file)).is_file()), None)
    if path is None:
        raise spec.problem("entry", f"no file {file}", "name the file in data, relative to the manifest's folder")
    data = path.read_bytes()
    try:
        module = ir.Module.parse(data, context)
        # A portable artifact is bytecode too, in a dialect of its own.
        versioned = any(operation.operation.name.startswith("vhlo.") for operation in module.body.operations)
        return mlir.read_artifact(context, data) if versioned else module
    except Exception as error:  # jaxlib raises ValueError or MLIRError, by version
        raise spec.problem("entry", f"{file} is not a StableHLO module: {_reason(str(error))}") from error


def _reason(message: str) -> str:
    """Return the location and the first complaint of MLIR's parser."""
    told = re.search(r'"-":(\d+):(\d+): (.*)', message)
    return f"line {told[1]}, column {told[2]}: {told[3]}" if told else message.strip().splitlines()[-1]


def _main(module: ir.Module, spec: FunctionSpec) -> Any:
    names = []
    for operation in module.body.operations:
        if isinstance(operation, func.FuncOp):
            names.append(ir.StringAttr(operation.attributes["sym_name"]).value)
            if names[-1] == "main":
                return operation
    raise spec.problem("entry", f"{spec.entry} has no function main", f"its functions: {', '.join(names) or 'none'}")


def _aval(spec: FunctionSpec, kind: ir.Type, what: str) -> Aval:
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        raise spec.problem("entry", f"{spec.entry}: {what} of main is {kind}", "make it a tensor of static shape")
    known = aval(kind)
    if known is None:
        raise spec.problem("entry", f"{spec.entry}: {what} of main is {kind}, which is not a dtype of JAX")
    return known


def aval(kind: ir.RankedTensorType) -> Aval | None:
    """Return the aval of a tensor of static shape; None if JAX has no such dtype."""
    dtype = _DTYPES.get(str(kind.element_type))
    return Aval(dtype, tuple(kind.shape)) if dtype else None


def _allowed(spec: FunctionSpec, module: ir.Module) -> tuple[str, ...]:
    """Return the safety checks that are off: those of the manifest, and custom calls that this jaxlib provides."""
    classes = {name: custom_calls.provider(name) for name in sorted(mlir.custom_calls(module))}
    unknown = [n for n, kind in classes.items() if kind == custom_calls.UNKNOWN and n not in spec.allow_custom_calls]
    if unknown:
        raise spec.unknown_custom_calls(unknown)
    names = [*spec.allow_custom_calls, *(n for n, kind in classes.items() if kind == custom_calls.TOOLCHAIN)]
    return (*spec.disabled_checks, *(f"custom_call:{name}" for name in names))


def _take_platform_index(module: ir.Module, main: Any) -> None:
    """Put a function before `main` that takes the platform's index first, as an artifact for several platforms must."""
    types = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    index = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
    attributes = {name: main.attributes[name] for name in ("arg_attrs", "res_attrs") if name in main.attributes}
    for name in attributes:
        del main.attributes[name]
    main.attributes["sym_name"] = ir.StringAttr.get("_module_main")
    main.attributes["sym_visibility"] = ir.StringAttr.get("private")
    with ir.InsertionPoint.at_block_begin(module.body):
        wrapper = func.FuncOp("main", ([index, *types.inputs], types.results))
    ours = ir.DictAttr.get({"jax.global_constant": ir.StringAttr.get("_platform_index")})
    theirs = attributes.get("arg_attrs")
    rest = list(ir.ArrayAttr(theirs)) if theirs else [ir.DictAttr.get({}) for _ in types.inputs]
    wrapper.attributes["arg_attrs"] = ir.ArrayAttr.get([ours, *rest])
    if "res_attrs" in attributes:
        wrapper.attributes["res_attrs"] = attributes["res_attrs"]
    arguments = [index, *types.inputs]
    block = wrapper.regions[0].blocks.append(*arguments, arg_locs=[ir.Location.unknown()] * len(arguments))
    with ir.InsertionPoint(block):
        call = func.CallOp(list(types.results), "_module_main", list(block.arguments)[1:])
        func.ReturnOp(call.results)
