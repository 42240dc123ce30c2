"""What an executable of XLA:CPU runs: the kinds of its operations, read from its bytes.

The numbers of fields are those of xla/backends/cpu/runtime/thunk.proto, xla/hlo/ir/hlo.proto and xla/xla_data.proto;
the tests compare them with the descriptors in jaxlib. Standard library only: nothing is handed to XLA.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping

from stagec.core.data import elf, wire

NESTED: Mapping[str, tuple[int, ...]] = {
    "call_thunk.called_sequence.thunks": (3, 1, 1),
    "conditional_thunk.branch_sequences.thunks": (4, 1, 1),
    "while_thunk.cond_sequence.thunks": (10, 1, 1),
    "while_thunk.body_sequence.thunks": (10, 2, 1),
}
"""Where in a thunk there are others: all such fields, as `known_builds.examined` checks."""
RESULT: Mapping[str, tuple[int, ...]] = {
    "hlo_module.hlo_module.computations": (1, 1, 3),
    "thunk_sequence.thunks": (6, 1),
    "object_files.contents": (8, 1),
}
"""Fields of the CompilationResultProto in an executable."""
THUNK: Mapping[str, tuple[int, ...]] = {
    "kind": (1,),
    "fft_thunk.fft_type": (13, 2),
    "custom_call_thunk.target_name": (16, 2),
    "collective_thunk.all_gather_thunk": (18, 4),
    "collective_thunk.all_reduce_thunk": (18, 5),
    "collective_thunk.all_to_all_thunk": (18, 6),
    "collective_thunk.reduce_scatter_thunk": (18, 7),
    "collective_thunk.collective_permute_thunk": (18, 8),
    "collective_thunk.all_reduce_thunk.reduction_kind": (18, 5, 1),
    "collective_thunk.reduce_scatter_thunk.reduction_kind": (18, 7, 1),
    "ynn_fusion_thunk.instruction_id": (21, 2),
}
TYPES: Mapping[str, tuple[int, ...]] = {
    f"{field}.shape.element_type": (*path, 1, 2)
    for field, path in {
        "sort_thunk.inputs_shapes": (5, 5),
        "xnn_fusion_thunk.xnn_dot_thunk.lhs_buffer_shape": (6, 2, 2),
        "xnn_fusion_thunk.xnn_dot_thunk.rhs_buffer_shape": (6, 2, 3),
        "xnn_fusion_thunk.xnn_dot_thunk.out_buffer_shape": (6, 2, 4),
        "xnn_fusion_thunk.xnn_convolution_thunk.input_buffer_shape": (6, 3, 4),
        "xnn_fusion_thunk.xnn_convolution_thunk.kernel_buffer_shape": (6, 3, 5),
        "xnn_fusion_thunk.xnn_convolution_thunk.output_buffer_shape": (6, 3, 6),
        "dot_thunk.lhs_buffer_shape": (7, 2),
        "dot_thunk.rhs_buffer_shape": (7, 3),
        "dot_thunk.out_buffer_shape": (7, 4),
        "fft_thunk.input_buffer_shape": (13, 4),
        "fft_thunk.output_buffer_shape": (13, 5),
        "convolution_thunk.input_buffer_shape": (17, 4),
        "convolution_thunk.kernel_buffer_shape": (17, 5),
        "convolution_thunk.output_buffer_shape": (17, 6),
        "collective_thunk.op_buffers.source_shapes_buffer_slices": (18, 2, 1),
    }.items()
}
"""Where thunks have the types of their arrays."""
INSTRUCTION: Mapping[str, tuple[int, ...]] = {
    "id": (35,),
    "opcode": (2,),
    "shape.element_type": (3, 2),
    "called_computation_ids": (38,),
}
COMPUTATION: Mapping[str, tuple[int, ...]] = {"id": (5,), "instructions": (2,)}

_RESULT = (1,)  # of an xla.ExecutableAndOptionsProto
_TRANSFORMS = ("fft", "ifft", "rfft", "irfft")
_PRIMITIVES = "? pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple ? c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4"
"""The names of xla.PrimitiveType, by number."""
_DEEPEST = 100
"""Protobuf's own parser stops there."""
_PARAMETER, _SILENT = "parameter:", ("tuple", "get-tuple-element")


def kinds(executable: bytes) -> frozenset[str]:
    """Return the kinds of operations of a serialized executable.

    "kernel" is machine code of its own, and "symbol NAME" a function that this code calls in the process. All others
    are XLA's: the kind of a thunk, what it computes and on which types, such as "dot f32 f32 f32" or "custom-call
    lapack_sgetrf_ffi". A fusion that YNNPACK runs has the operations in it. Raises ValueError when it is not one.
    """
    try:
        results = list(wire.find(wire.delimited(executable)[1], _RESULT))
        listed = {kind for result in results for kind in (*_of_thunks(result), *_of_code(result))}
    except (struct.error, LookupError) as error:
        raise ValueError(f"machine code that is damaged: {error}") from error
    if not listed:
        raise ValueError("it has no operations")
    return frozenset(listed)


def _of_thunks(result: bytes) -> Iterator[str]:
    left = [(0, thunk) for thunk in wire.find(result, RESULT["thunk_sequence.thunks"])]
    fusions: Mapping[int, str] | None = None
    while left:
        depth, thunk = left.pop()
        if depth > _DEEPEST:  # each is read again for each that it is in
            raise ValueError(f"operations in operations, more than {_DEEPEST} deep")
        left += ((depth + 1, inner) for path in NESTED.values() for inner in wire.find(thunk, path))
        words = [_text(thunk, "kind")]
        words += [_TRANSFORMS[kind] if kind < len(_TRANSFORMS) else f"type {kind}" for kind in _transform(thunk)]
        words += [name for name in [_text(thunk, "custom_call_thunk.target_name")] if name]
        words += [
            name.partition(".")[2].removesuffix("_thunk").replace("_", "-")
            for name, path in THUNK.items()
            if re.fullmatch(r"collective_thunk\.\w+", name) and any(True for _ in wire.find(thunk, path))
        ]
        words += [name for name in (_text(thunk, field) for field in THUNK if field.endswith("reduction_kind")) if name]
        types = [_number(payload) for path in TYPES.values() for payload in wire.find(thunk, path)]
        words += map(_type, sorted({*types}) if words[0] == "sort" else types)
        for number in map(_number, wire.find(thunk, THUNK["ynn_fusion_thunk.instruction_id"])):
            if fusions is None:
                fusions = dict(_fused(result))
            words.append(fusions.get(number, "unknown"))
        yield " ".join(words)


def _transform(thunk: bytes) -> Iterator[int]:
    """Yield the type of a Fourier transform; the first is 0, and protobuf stores no 0."""
    fields = {record.field for record in wire.records(thunk)}
    if THUNK["fft_thunk.fft_type"][0] in fields:
        yield next(map(_number, wire.find(thunk, THUNK["fft_thunk.fft_type"])), 0)


def _fused(result: bytes) -> Iterator[tuple[int, str]]:
    """Yield the instructions that call computations, by number, and the operations in those, with what they take."""
    inside: dict[int, frozenset[str]] = {}
    calling: list[tuple[int, list[int]]] = []
    for computation in wire.find(result, RESULT["hlo_module.hlo_module.computations"]):
        operations = set()
        for instruction in wire.find(computation, COMPUTATION["instructions"]):
            opcode = next(wire.find(instruction, INSTRUCTION["opcode"]), b"").decode("utf-8", "replace")
            types = [_type(_number(payload)) for payload in wire.find(instruction, INSTRUCTION["shape.element_type"])]
            if opcode not in _SILENT:
                operations.add(":".join([opcode, *types]))
            calls = [*_numbers(wire.find(instruction, INSTRUCTION["called_computation_ids"]))]
            if calls:
                (number,) = map(_number, wire.find(instruction, INSTRUCTION["id"]))
                calling.append((number, calls))
        (name,) = map(_number, wire.find(computation, COMPUTATION["id"]))
        inside[name] = frozenset(operations)
    for number, calls in calling:
        operations = {operation for name in calls for operation in inside.get(name, {"unknown"})}
        taken = sorted(each.partition(":")[2] for each in operations if each.startswith(_PARAMETER))
        yield number, " ".join([*sorted(each for each in operations if not each.startswith(_PARAMETER)), "of", *taken])


def _of_code(result: bytes) -> Iterator[str]:
    """Yield the functions that machine code calls and does not have."""
    for code in wire.find(result, RESULT["object_files.contents"]):
        for name in elf.undefined(code):
            yield f"symbol {name}"


def _text(message: bytes, name: str) -> str:
    return next(wire.find(message, THUNK[name]), b"").decode("utf-8", "replace")


def _number(payload: bytes) -> int:
    return wire.read_varint(payload, 0)[0]


def _numbers(payloads: Iterator[bytes]) -> Iterator[int]:
    """Yield the numbers of a repeated field, packed or not."""
    for payload in payloads:
        at = 0
        while at < len(payload):
            number, at = wire.read_varint(payload, at)
            yield number


def _type(number: int) -> str:
    names = _PRIMITIVES.split()
    name = names[number] if number < len(names) else "?"
    return f"type{number}" if name == "?" else name
