"""`Lowered`: a StableHLO module for one platform with static shapes, made from an `Exported` without JAX.

Fields and methods are those of `jax.stages.Lowered` (https://docs.jax.dev/en/latest/jax.stages.html).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxlib import _jax, xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from stagec.core.avals import Aval, evaluate_shape, physical
from stagec.core.specs import CompilerOption, TargetSpec
from stagec.core.trees import Tree
from stagec.pjrt import clients, compatibility
from stagec.pjrt.arrays import dtype_of
from stagec.stages import mlir
from stagec.stages.branches import inline_known_branches
from stagec.stages.exported import Exported, OneSharding
from stagec.stages.shardings import Format, GSPMDSharding

if TYPE_CHECKING:
    from stagec.stages.compiled import Compiled

_ALIAS = "tf.aliasing_output"
"""The attribute of a donated argument that tells the number of the result that takes its buffer."""


class CannotLower(ValueError):
    """An `Exported` cannot be lowered as asked; the message says what to change."""


class SizesDoNotFit(CannotLower):
    """The sizes of the dimensions break a constraint of the function; the message says which, and whose sizes."""


@dataclass(frozen=True)
class ArgInfo:
    """What is known of one argument.

    shape: its sizes. dtype: numpy's. donated: whether the caller gives its buffer away.
    """

    shape: tuple[int, ...]
    dtype: Any
    donated: bool


@dataclass(frozen=True)
class OutInfo:
    """What is known of one result.

    shape: its sizes. dtype: numpy's. format: its layout and sharding; None for each where XLA may choose.
    """

    shape: tuple[int, ...]
    dtype: Any
    format: Format

    @property
    def sharding(self) -> Any:
        """How it is split over devices; None where XLA may choose."""
        return self.format.sharding


def args_info(in_tree: Tree, in_avals: Sequence[Aval], donated: Sequence[bool]) -> Any:
    """Return an `ArgInfo` for each argument, in the structure `(args, kwargs)`."""
    return in_tree.unflatten(
        [
            ArgInfo(tuple(map(int, aval.shape)), dtype_of(aval), given_away)
            for aval, given_away in zip(in_avals, donated, strict=True)
        ]
    )


def out_info(out_tree: Tree, out_avals: Sequence[Aval], formats: Sequence[Format]) -> Any:
    """Return an `OutInfo` for each result, in the structure of the result."""
    return out_tree.unflatten(
        [
            OutInfo(tuple(map(int, aval.shape)), dtype_of(aval), found)
            for aval, found in zip(out_avals, formats, strict=True)
        ]
    )


def donate_argnums(donated: Sequence[bool]) -> tuple[int, ...]:
    """Return the indices of the donated arguments, among the leaves of the arguments."""
    return tuple(i for i, given_away in enumerate(donated) if given_away)


@dataclass(frozen=True)
class Lowered:
    """A StableHLO module with static shapes for one platform, and what is needed to compile and call it.

    Methods are those of `jax.stages.Lowered` (https://docs.jax.dev/en/latest/jax.stages.html#jax.stages.Lowered).

    fun_name: name of the function.
    platform: the one platform it is for.
    in_tree, out_tree: structure of `(args, kwargs)` and of the result.
    flat_in_avals, flat_out_avals: static, in the order of the trees' leaves; a PRNG key is the u32 words that hold it,
        float0 is bool.
    kept_var_idx: sorted indices of the arguments that the module takes, among the leaves; the others are unused.
    donated: for each argument, whether the caller gives its buffer away.
    custom_calls: sorted names of the custom calls that the module makes.
    module: MLIR bytecode of the module; its locations hold argument names only, where it was exported so.
    nr_devices: how many devices the module runs on, in one partition each.
    in_shardings, out_shardings: how each array is split over them; None where XLA may choose.
    in_memory_kinds, out_memory_kinds: of each array that the module takes or gives the memory that it lies in, such as
        "pinned_host"; None is the device's own.
    compiler_options: those that the function asks for.
    """

    fun_name: str
    platform: str
    in_tree: Tree
    flat_in_avals: tuple[Aval, ...]
    out_tree: Tree
    flat_out_avals: tuple[Aval, ...]
    kept_var_idx: tuple[int, ...]
    donated: tuple[bool, ...]
    custom_calls: tuple[str, ...]
    module: bytes = field(repr=False)
    nr_devices: int
    in_shardings: tuple[OneSharding, ...]
    out_shardings: tuple[OneSharding, ...]
    compiler_options: Mapping[str, CompilerOption] = field(default_factory=dict)
    in_memory_kinds: tuple[str | None, ...] = ()
    out_memory_kinds: tuple[str | None, ...] = ()

    @property
    def args_info(self) -> Any:
        """An `ArgInfo` for each argument, in the structure `(args, kwargs)`."""
        return args_info(self.in_tree, self.flat_in_avals, self.donated)

    @property
    def in_avals(self) -> Any:
        """The `Aval` of each argument, in the structure `(args, kwargs)`."""
        return self.in_tree.unflatten(self.flat_in_avals)

    @property
    def out_info(self) -> Any:
        """An `OutInfo` for each result, in the structure of the result; no layout is known yet."""
        formats = [
            Format(None, GSPMDSharding(str(sharding)) if isinstance(sharding, xla_client.HloSharding) else sharding)
            for sharding in self.out_shardings
        ]
        return out_info(self.out_tree, self.flat_out_avals, formats)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Indices of the donated arguments, among the leaves of the arguments."""
        return donate_argnums(self.donated)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """Return the module: of jaxlib's `ir.Module` for "stablehlo" (the default), of its `XlaComputation` for "hlo".

        Raises ValueError for another dialect.
        """
        match dialect:
            case None | "stablehlo":
                with mlir.make_context():
                    return ir.Module.parse(self.module)
            case "hlo":
                return _jax.mlir.mlir_module_to_xla_computation(self.module, use_tuple_args=False)
        raise ValueError(f"unknown dialect: {dialect}; write stablehlo or hlo")

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the module as text.

        dialect: "stablehlo" (the default) or "hlo". debug_info: with locations, or HLO's metadata.
        Raises ValueError for another dialect.
        """
        module = self.compiler_ir(dialect)
        if dialect != "hlo":
            return str(module.operation.get_asm(enable_debug_info=debug_info))
        options = compatibility.hlo_print_options()
        options.print_metadata = debug_info
        return str(module.as_hlo_module().to_string(options))

    def cost_analysis(self) -> dict[str, float]:
        """Return XLA's estimate before optimization, by XLA's names: "flops", "bytes accessed" and others."""
        module = self.compiler_ir("hlo").as_hlo_module()
        return dict(_jax.hlo_module_cost_analysis(clients.cpu_client(1), module))

    def compile(
        self, compiler_options: Mapping[str, CompilerOption] | None = None, target: TargetSpec | None = None
    ) -> Compiled:
        """Compile, and return what can be called.

        compiler_options: as of `jit`; they go before those of the function.
        target: None is the CPU of this machine. A named target needs a process that was prepared for it
            (`prepare_process` of its backend, as the compile command does).
        Raises CannotCompile when XLA refuses the module or an option, or an option cannot have its value.
        """
        from stagec.stages.compiled import compile_lowered

        return compile_lowered(self, {**self.compiler_options, **(compiler_options or {})}, target)


CALLING_CONVENTIONS = (9, 10)
"""The versions of the module's calling convention that `lower_exported` knows.

https://docs.jax.dev/en/latest/export/export.html#calling-convention-versions
"""


def lower_exported(exported: Exported, platform: str, bucket: Mapping[str, int]) -> Lowered:
    """Bind an `Exported` to one platform and to a size for each dimension variable.

    bucket: dimension variable -> size; empty when the shapes are static.

    The platform index and the dimensions become constants, and shape refinement makes every type static, as
    `jax.export` documents for a caller of the module
    (https://docs.jax.dev/en/latest/export/export.html#module-calling-convention).
    Raises CannotLower when the platform was not exported, the module has another calling convention or the bucket does
    not fit, SizesDoNotFit when a constraint does not hold.
    """
    if exported.calling_convention_version not in CALLING_CONVENTIONS:
        have = f"{exported.fun_name} has version {exported.calling_convention_version} of the calling convention"
        raise CannotLower(f"{have}, this version of stagec knows {' and '.join(map(str, CALLING_CONVENTIONS))}")
    if platform not in exported.platforms and "platform" not in exported.disabled_safety_checks:
        raise CannotLower(f"{exported.fun_name} was exported for {', '.join(exported.platforms)}, not for {platform}")
    in_avals = tuple(_static(aval, bucket, exported.fun_name) for aval in exported.in_avals)
    with mlir.make_context(), ir.Location.unknown():
        try:
            module = mlir.read_artifact(ir.Context.current, exported.mlir_module_serialized)
            main = mlir.main_function(module)
        except ValueError as error:
            raise CannotLower(f"{exported.fun_name}: {error}") from error
        kept = exported.module_kept_var_idx
        has_index = len(exported.platforms) > 1
        tokens = len(exported.ordered_effects)
        if len(main.regions[0].blocks[0].arguments) != has_index + tokens + len(kept):
            raise CannotLower(f"{exported.fun_name}: its module does not take the arguments that it declares")
        if has_index:
            index = exported.platforms.index(platform) if platform in exported.platforms else 0
            _bind_first_argument(main, lambda kind: _constant(kind, index))
        for _ in range(tokens):
            _bind_first_argument(main, lambda _: stablehlo.create_token())
        _drop_results(main, tokens)
        _set_argument_shapes(main, [in_avals[i] for i in kept])
        if exported.uses_global_constants:
            module = _refine(module, exported.fun_name)
            if has_index:
                inline_known_branches(module)
            main = mlir.main_function(module)
        given_away = _donated(main)
        out_types = [ir.RankedTensorType(t) for t in _type(main).results]
        return Lowered(
            fun_name=exported.fun_name,
            platform=platform,
            in_tree=exported.in_tree,
            flat_in_avals=in_avals,
            out_tree=exported.out_tree,
            flat_out_avals=tuple(
                Aval(physical(aval).dtype, tuple(t.shape))
                for aval, t in zip(exported.out_avals, out_types, strict=True)
            ),
            kept_var_idx=kept,
            donated=tuple(i in kept and given_away[kept.index(i)] for i in range(len(in_avals))),
            custom_calls=tuple(sorted(mlir.custom_calls(module))),
            module=mlir.to_bytecode(module),
            nr_devices=exported.nr_devices,
            in_shardings=exported._in_shardings,
            out_shardings=exported._out_shardings,
            in_memory_kinds=_memory_kinds(main, "arg_attrs", len(kept)),
            out_memory_kinds=_memory_kinds(main, "res_attrs", len(out_types)),
        )


def _static(aval: Aval, bucket: Mapping[str, int], fun_name: str) -> Aval:
    try:
        shape = evaluate_shape(aval.shape, bucket)
    except ValueError as error:
        raise CannotLower(f"{fun_name}: {aval}: {str(error).partition(': ')[2]}") from error
    return physical(Aval(aval.dtype, shape))


def _constant(kind: ir.Type, value: int) -> Any:
    """Return a constant of the type of a platform index, which has 64 bits where JAX traced with x64 enabled."""
    scalar = ir.RankedTensorType(kind)
    splat = ir.DenseElementsAttr.get_splat(scalar, ir.IntegerAttr.get(scalar.element_type, value))
    return stablehlo.constant(splat)


def _bind_first_argument(main: ir.OpView, make: Callable[[ir.Type], Any]) -> None:
    """Replace the first argument of `main` by the value of its type that `make` makes at the start of the body."""
    block = main.regions[0].blocks[0]
    first = block.arguments[0]
    with ir.InsertionPoint.at_block_begin(block):
        first.replace_all_uses_with(make(first.type))
    if "arg_attrs" in main.attributes:
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(list(ir.ArrayAttr(main.attributes["arg_attrs"]))[1:])
    block.erase_argument(0)
    _update_type(main)


def _drop_results(main: ir.OpView, count: int) -> None:
    """Return from `main` without its first `count` results: the tokens of ordered effects."""
    if not count:
        return
    end = list(main.regions[0].blocks[0].operations)[-1]
    results = list(end.operands)[count:]
    with ir.InsertionPoint(end):
        func.return_(results)
    end.operation.erase()
    if "res_attrs" in main.attributes:
        main.attributes["res_attrs"] = ir.ArrayAttr.get(list(ir.ArrayAttr(main.attributes["res_attrs"]))[count:])
    if "arg_attrs" in main.attributes:
        attributes = [_alias_earlier(ir.DictAttr(a), count) for a in ir.ArrayAttr(main.attributes["arg_attrs"])]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
    arguments = _type(main).inputs
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(arguments, [r.type for r in results]))


def _alias_earlier(attributes: ir.DictAttr, count: int) -> ir.DictAttr:
    """Return the attributes of an argument, for a `main` without its first `count` results."""
    named = {attribute.name: attribute.attr for attribute in map(attributes.__getitem__, range(len(attributes)))}
    if _ALIAS in named:
        number = ir.IntegerAttr(named[_ALIAS])
        named[_ALIAS] = ir.IntegerAttr.get(number.type, number.value - count)
    return ir.DictAttr.get(named)


def _set_argument_shapes(main: ir.OpView, avals: list[Aval]) -> None:
    """Give each argument of `main` its static shape; inside, convert back to the type that its users expect."""
    block = main.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block):
        for argument, aval in zip(list(block.arguments), avals, strict=True):
            dynamic = ir.RankedTensorType(argument.type)
            static = ir.RankedTensorType.get([int(size) for size in aval.shape], dynamic.element_type, dynamic.encoding)
            if static == dynamic:
                continue
            argument.set_type(static)
            converted = stablehlo.ConvertOp(dynamic, argument)
            argument.replace_all_uses_except(converted.result, [converted.operation])
    _update_type(main)


def _update_type(main: ir.OpView) -> None:
    arguments = [argument.type for argument in main.regions[0].blocks[0].arguments]
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(arguments, _type(main).results))


def _type(main: ir.OpView) -> ir.FunctionType:
    return ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)


def _refine(module: ir.Module, fun_name: str) -> ir.Module:
    try:
        return ir.Module.parse(_refined(module))
    except Exception as error:  # XLA's status; a shape assertion of the module arrives here too
        violated = _violated(str(error)) or _violated_alone(module)
        if violated:
            raise SizesDoNotFit(f"{fun_name}: {violated}") from error
        status = str(error).strip()
        raise CannotLower(f"{fun_name}: {status.splitlines()[0] if status else 'shape refinement failed'}") from error


def _refined(module: ir.Module) -> bytes:
    return bytes(
        _jax.mlir.refine_polymorphic_shapes(
            mlir.to_bytecode(module), enable_shape_assertions=True, validate_static_shapes=True, enable_shardy=True
        )
    )


_SIZE = re.compile(r"'(\w+)' = (\d+) from specification '([^']+)' for dimension (.+?) \(= (\d+)\)")
"""How the shape assertions of `jax.export` tell where the size of a name comes from."""


def _violated(status: str) -> str:
    """Return what the failed shape assertion in XLA's status says, with the sizes and their arguments; "" without."""
    assertion = re.search(r"Input shapes do not match .*?(?=\s*Using the following|\s*Obtained dimension|$)", status)
    if not assertion:
        return ""
    sizes = dict.fromkeys(  # the status has it more than once
        f"{name} = {value} ({place} = {size}{'' if expression == name else f', which is {expression}'})"
        for name, value, expression, place, size in _SIZE.findall(status)
    )
    return ": ".join(filter(None, [assertion.group().rstrip(". "), ", ".join(sizes)]))


def _violated_alone(module: ir.Module) -> str:
    """Return the shape assertion of `main` that does not hold, "" where all do; the module is of no use after that.

    What depends on a constraint may end refinement before XLA gets to the assertion, a slice for example. So the
    function that `main` calls after them is left out.
    """
    main = mlir.main_function(module)
    block = main.regions[0].blocks[0]
    *operations, end = list(block.operations)
    with ir.InsertionPoint(end):
        func.return_([])
    end.operation.erase()
    for operation in reversed(operations):
        if operation.operation.name == "func.call" and not any(list(r.uses) for r in operation.operation.results):
            operation.operation.erase()
    for name in ("arg_attrs", "res_attrs"):
        if name in main.attributes:
            del main.attributes[name]
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(_type(main).inputs, []))
    try:
        _refined(module)
    except Exception as error:  # noqa: BLE001 - as above
        return _violated(str(error))
    return ""


def _memory_kinds(main: ir.OpView, which: str, count: int) -> tuple[str | None, ...]:
    """Return the memory of each array that `main` takes ("arg_attrs") or gives ("res_attrs"); None: the usual one."""
    if which not in main.attributes:
        return (None,) * count
    attributes = [ir.DictAttr(one) for one in ir.ArrayAttr(main.attributes[which])]
    kinds = [ir.StringAttr(a["mhlo.memory_kind"]).value if "mhlo.memory_kind" in a else "device" for a in attributes]
    return tuple(None if kind == "device" else kind for kind in kinds)


def _donated(main: ir.OpView) -> list[bool]:
    """For each argument of `main`, whether it may be overwritten (https://docs.jax.dev/en/latest/buffer_donation.html)."""
    if "arg_attrs" not in main.attributes:
        return [False] * len(main.regions[0].blocks[0].arguments)
    attributes = [ir.DictAttr(a) for a in ir.ArrayAttr(main.attributes["arg_attrs"])]
    return [_ALIAS in a or "jax.buffer_donor" in a for a in attributes]
