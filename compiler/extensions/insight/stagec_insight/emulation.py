"""Run the optimized program of a device's compiler on CPUs, to find its faults without the device.

Fusions become calls, bitcasts what they do to elements in memory, what runs beside something else runs at once, and
calls of a vendor's libraries their reference (`device_calls`). A partition of the program becomes a replica: CPUs run
the collectives that the partitioner wrote, and partition nothing again.

The meaning of the instructions: https://openxla.org/xla/operation_semantics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxlib import _jax, xla_client

from stagec.backends.compilation import set_options
from stagec.backends.cpu import defects
from stagec.core.builds.specs import CompilerOption
from stagec.core.messages.refusal import LoadError
from stagec.costs import collectives, hlo
from stagec.costs.array_types import NotStatic, array
from stagec.pjrt import clients, compatibility, turns
from stagec.pjrt.custom_calls import register_custom_calls
from stagec.pjrt.executable import ArraySpecs, Executable
from stagec_insight import bitcasts, device_calls
from stagec_insight.hlo_writer import Refused, Writer, listed, plain

_ALIASES = re.compile(r" input_output_alias=\{ (.*?) \}(?:,|$)")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}, [a-z]+-alias\)")
_DROPPED = frozenset(
    (
        "algorithm",
        "async_execution_thread",
        "backend_config",
        "channel_id",
        "constrain_layout",
        "control-predecessors",
        "frontend_attributes",
        "kind",
        "metadata",
        "operand_precision",
        "origin",
        "output_to_operand_aliasing",
        "result_accuracy",
        "sharding",
        "statistics",
        "use_global_device_ids",
    )
)
"""Attributes that do not change the result, or that name the devices of partitions."""
_REFUSED = {
    **dict.fromkeys(("infeed", "outfeed", "send", "send-done", "recv", "recv-done"), "it exchanges data with a host"),
    "rng-get-and-update-state": "its state is the device's",
    "ragged-all-to-all": "CPUs have no such exchange",
}


class NotCovered(Exception):
    """Instructions that have no form for CPUs. reasons: for each its name, and why."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {why}" for name, why in reasons.items()))
        self.reasons = dict(reasons)


def for_cpus(text: str, num_devices: int = 1) -> str:
    """Return an optimized program as one for CPUs: HLO text, with a replica for each partition.

    text: HLO with the layouts and the elements of constants. Raises NotCovered.
    """
    program = hlo.parse(text)
    reasons: dict[str, str] = {}
    pieces = [f"HloModule {_name(text)}\n"]
    for computation in program.computations.values():
        writer = Writer(computation, program, num_devices)
        for instruction in computation.instructions.values():
            writer.begin(instruction)
            try:
                _check(writer)
                writer.values[instruction.name] = _rewrite(writer)
            except (NotStatic, Refused) as refused:
                target = writer.attributes.get("custom_call_target")
                what = f"{instruction.opcode} {target}" if target else instruction.opcode
                reasons[instruction.name] = f"{what}: {refused}"
                writer.values[instruction.name] = writer.zeros(writer.type)
        root = writer.values[computation.root.name]
        lines = "".join(f"  {'ROOT ' if name == root else ''}{line}\n" for name, line in writer.lines)
        entry = "ENTRY " if computation.name == program.entry else ""
        pieces += [*writer.beside, f"{entry}%{computation.name} {{\n{lines}}}\n"]
    if reasons:
        raise NotCovered(reasons)
    return "\n".join(pieces)


def _name(text: str) -> str:
    return re.split(r"[ ,\n]", text.removeprefix("HloModule "), maxsplit=1)[0]


def _check(writer: Writer) -> None:
    """Compare a call's operands and result with the computation's parameters and result, layouts too: nothing copies.

    Raises Refused. Instructions are for CPUs without layouts, so what follows a wrong one would not show it.
    """
    instruction, computations = writer.instruction, writer.program.computations
    types, opcode, pairs = list(map(writer.type_of, instruction.operands)), instruction.opcode, []
    if opcode in ("call", "fusion", "async-start") and instruction.called:
        called = computations[instruction.called]
        pairs = list(zip(types, [parameter.type for parameter in called.parameters], strict=True))
        pairs.append((called.root.type, instruction.result))
    elif opcode == "while":
        for which in ("condition", "body"):
            called = computations[writer.attributes[which].removeprefix("%")]
            pairs += [(types[0], called.parameters[0].type)]
        pairs += [(called.root.type, instruction.type), (types[0], instruction.type)]
    elif opcode == "conditional":
        for name, operand in instruction.branches:
            pairs += [(writer.type_of(operand), computations[name].parameters[0].type)]
            pairs += [(computations[name].root.type, instruction.type)]
    elif opcode == "tuple":
        pairs = list(zip(types, hlo.parts(instruction.type), strict=True))
    elif opcode == "get-tuple-element" and instruction.number is not None:
        pairs = [(hlo.parts(types[0])[instruction.number], instruction.type)]
    for passed, taken in pairs:
        _compare(passed, taken)


def _compare(passed: str, taken: str) -> None:
    """Raise Refused where two types are not the same in memory; XLA:TPU changes floats between fusions."""
    for first, second in zip(hlo.elements(passed), hlo.elements(taken), strict=True):
        if first.startswith(("token", "opaque")) or first.partition("[")[0] != second.partition("[")[0]:
            continue
        if array(first) != array(second):
            raise Refused(f"{first} is passed as {second}")


def check_aliases(text: str, donated: Collection[int]) -> None:
    """Compare the parameters with memory that results take with the donated ones.

    donated: numbers of parameters. Raises NotCovered.
    """
    parameters, results = hlo.entry_types(text)
    taken: dict[int, str] = {}
    reasons: dict[str, str] = {}
    aliases = _ALIASES.search(text.partition("\n")[0])
    for index, number in _ALIAS.findall(aliases[1]) if aliases else ():
        result, parameter = int(index or 0), int(number)
        name, had = f"result {result}", taken.setdefault(parameter, index)
        if parameter not in donated:
            reasons[name] = f"it takes the memory of parameter {parameter}, which is not donated"
        elif had != index:
            reasons[name] = f"it takes the memory of parameter {parameter}, as result {had} does"
        elif hlo.size(results[result]) > hlo.size(parameters[parameter]):
            reasons[name] = f"{results[result]} takes the memory of {parameters[parameter]}"
    if reasons:
        raise NotCovered(reasons)


def _rewrite(writer: Writer) -> str:
    opcode = writer.instruction.opcode
    if opcode in _REFUSED:
        raise Refused(_REFUSED[opcode])
    if opcode in _REWRITES:
        return _REWRITES[opcode](writer)
    if opcode.endswith("-start"):
        return _start(writer)
    if opcode.endswith(("-done", "-update")):
        return _done(writer)
    return _same(writer)


def _kept(writer: Writer) -> dict[str, str]:
    return {name: value for name, value in writer.attributes.items() if name not in _DROPPED}


def _same(writer: Writer, operation: str = "", type_: str = "") -> str:
    """The same instruction, without attributes for the device."""
    opcode, rest = operation or writer.instruction.opcode, _kept(writer)
    if "replica_groups" in rest:
        rest["replica_groups"] = _groups(writer)
        rest.pop("device_ids", None)
    operands = writer.operands
    if _mixed(opcode, writer.type):
        operands = [_converted(writer, operand, array(writer.type).dtype) for operand in operands]
    type_ = type_ or writer.type
    if opcode in _ONE_BY_ONE and type_.startswith("("):
        # With several operands XLA:CPU (jaxlib 0.10.2) gathers other values than with each alone.
        alone = zip(hlo.parts(type_), operands, strict=True)
        return writer.add(type_, "tuple", *(writer.add(part, opcode, operand, **rest) for part, operand in alone))
    return writer.add(type_, opcode, *operands, **rest)


_FLOATS = frozenset(("bf16", "f16", "f32"))
_ONE_BY_ONE = frozenset(("all-gather", "all-reduce", "collective-permute", "reduce-scatter"))
"""Exchanges that treat each of several arrays like one."""
_OTHER_DTYPE = frozenset(
    [
        "convert",
        "dot",
        "convolution",
        "compare",
        "is-finite",
        "bitcast-convert",
        "real",
        "imag",
        "complex",
        "abs",
        "call",
    ]
)
"""Operations that may have a result of another dtype than their operands on all platforms."""


def _mixed(opcode: str, type_: str) -> bool:
    """Whether an operation of XLA:TPU may have floats of another width than its result."""
    return opcode not in _OTHER_DTYPE and type_.partition("[")[0] in _FLOATS


def _converted(writer: Writer, operand: str, dtype: str) -> str:
    type_ = writer.types[operand]
    return writer.cast(operand, dtype) if type_.partition("[")[0] in _FLOATS - {dtype} else operand


def _reduce(writer: Writer) -> str:
    """The same, in the dtypes that the reducer has; XLA:TPU may give others."""
    instruction = writer.instruction
    root = writer.program.computations[instruction.called].root.type
    wanted = [type_.partition("[")[0] for type_ in hlo.elements(root)]
    given = list(map(array, hlo.elements(instruction.type)))
    operands = [_converted(writer, name, wanted[i % len(wanted)]) for i, name in enumerate(writer.operands)]
    types = [type_._replace(dtype=dtype).plain for type_, dtype in zip(given, wanted, strict=True)]
    if not writer.type.startswith("("):
        made = writer.add(types[0], instruction.opcode, *operands, **_kept(writer))
        return _converted(writer, made, given[0].dtype)
    made = writer.add(f"({', '.join(types)})", instruction.opcode, *operands, **_kept(writer))
    if wanted == [type_.dtype for type_ in given]:
        return made
    parts = [_converted(writer, writer.element(made, i), type_.dtype) for i, type_ in enumerate(given)]
    return writer.add(writer.type, "tuple", *parts)


def _groups(writer: Writer) -> str:
    """Which replicas exchange with each other, as the partitions do."""
    given = writer.attributes
    exchange = collectives.exchange(writer.instruction, writer.computation, False)
    if exchange is None or not exchange.among:
        raise Refused(f"its groups cannot be read: {given['replica_groups']}")
    # Without ids of devices the groups are of replicas, and all partitions of them exchange: there is one replica.
    whole = given["replica_groups"] == "{{0}}" and "channel_id" in given and "use_global_device_ids" not in given
    groups = collectives.groups("{}" if whole else exchange.among, writer.num_devices)
    return "{" + ",".join(map(listed, groups)) + "}"


def _written(writer: Writer) -> str:
    return writer.write(writer.type, f"{writer.instruction.opcode}({writer.instruction.written})", {})


def _called(writer: Writer, type_: str) -> str:
    """Write a call; its operands and result have the dtypes of the computation."""
    called = writer.program.computations[writer.instruction.called]
    passed = [
        _converted(writer, operand, plain(parameter.type).partition("[")[0])
        for operand, parameter in zip(writer.operands, called.parameters, strict=True)
    ]
    made = writer.add(plain(called.root.type), "call", *passed, to_apply=f"%{called.name}")
    return _converted(writer, made, type_.partition("[")[0])


def _start(writer: Writer) -> str:
    """Run an asynchronous start at once; its result is in a tuple, as on the device."""
    operation, operands = writer.instruction.operation, writer.operands
    if operation == "all-reduce":
        return _same(writer, operation)
    first, result, *context = hlo.parts(writer.type)
    if operation == "copy":
        made = operands[0]
    elif operation in ("async", "call", "fusion"):
        made = _called(writer, result)
    else:
        made = _same(writer, operation, result)
    passed = writer.add(first, "tuple", *operands) if first.startswith("(") else operands[0]
    return writer.add(writer.type, "tuple", passed, made, *map(writer.zeros, context))


def _done(writer: Writer) -> str:
    (started,), opcode = writer.operands, writer.instruction.opcode
    if opcode.endswith("-update") or opcode == "all-reduce-done":
        return started
    return writer.element(started, 0 if opcode == "copy-done" else 1)


_REWRITES: Mapping[str, Callable[[Writer], str]] = {
    "bitcast": bitcasts.rewrite,
    "constant": _written,
    "copy": lambda writer: _converted(writer, writer.operands[0], writer.type.partition("[")[0]),
    "custom-call": device_calls.rewrite,
    "fusion": lambda writer: _called(writer, writer.type),
    "parameter": _written,
    "partition-id": lambda writer: writer.add(writer.type, "replica-id"),
    "reduce": _reduce,
    "replica-id": lambda writer: writer.zeros(writer.type),  # there is one, for each partition
}


def module(serialized: bytes) -> Any:
    """Return jaxlib's HloModule of XLA's HloModuleProto."""
    return compatibility.hlo().HloModule.from_serialized_hlo_module_proto(serialized)


def readable(optimized: Any) -> str:
    """Return jaxlib's HloModule as a string for `for_cpus`."""
    options = compatibility.hlo().HloPrintOptions()
    options.print_large_constants = True
    options.print_metadata = False
    return str(optimized.to_string(options))


class _Replicas:
    """jaxlib's executable of replicas, with the shardings of the partitions that the replicas stand for."""

    def __init__(self, loaded: _jax.LoadedExecutable, optimized: Any) -> None:
        # Without shardings each device has the whole of all arrays.
        taken, given = optimized.spmd_parameters_shardings, optimized.spmd_output_sharding
        self._taken = taken or [xla_client.HloSharding.replicate().to_proto()]
        self._given = (given.tuple_shardings or [given]) if given else self._taken[:1]
        self.execute_sharded = loaded.execute_sharded
        self.get_output_memory_kinds = loaded.get_output_memory_kinds
        self.get_parameter_layouts, self.get_output_layouts = loaded.get_parameter_layouts, loaded.get_output_layouts

    def get_parameter_shardings(self) -> Any:
        """Return those of the device's program."""
        return self._taken

    def get_output_shardings(self) -> Any:
        """Return those of the device's program."""
        return self._given


def load(
    serialized: bytes, parameters: ArraySpecs, results: ArraySpecs, num_devices: int = 1, donated: Collection[int] = ()
) -> Executable:
    """Compile an optimized program of a device for as many CPU devices.

    serialized: XLA's HloModuleProto. parameters, results: of each array shape and dtype, whole. donated: numbers of the
    parameters with memory that results may take; here they take none.
    Raises NotCovered; LoadError ("executable") if XLA refuses the new program, ("device-count").
    """
    optimized = module(serialized)
    text = readable(optimized)
    check_aliases(text, donated)
    rewritten = for_cpus(text, num_devices)
    register_custom_calls(set(re.findall(r'custom_call_target="([^"]+)"', rewritten)))
    devices = clients.devices("cpu", num_devices)
    options = clients.compile_options([device.id for device in devices], replicated=True)
    try:
        parsed = compatibility.hlo().hlo_module_from_text(rewritten)
        stablehlo = _jax.mlir.hlo_to_stablehlo(parsed.as_serialized_hlo_module_proto())

        def compiling(given: Mapping[str, CompilerOption]) -> Any:
            set_options(options, given)
            with turns.for_this_machine():
                return devices[0].client.compile_and_load(stablehlo, _jax.DeviceList(tuple(devices)), options)

        loaded, _ = defects.around(compiling, {})
    except (_jax.JaxRuntimeError, ValueError) as error:
        raise LoadError("executable", f"XLA does not take it for CPUs: {error}") from error
    return Executable(_Replicas(loaded, optimized), parameters, results, devices)
