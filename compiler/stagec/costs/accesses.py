"""How many bytes of a device's main memory an instruction of an optimized program reads and writes.

An instruction reads its operands and writes its result. A fusion does so as a whole: what is inside it is in no
memory. Where only a part of an array is read or written, the part counts. These are XLA's rules
(xla/service/hlo_cost_analysis.cc), but that XLA counts arrays in a core's own memory as well.
"""

from __future__ import annotations

import functools

from stagec.core.builds.specs import COLLECTIVES
from stagec.costs import hlo, operations
from stagec.costs.hlo import Computation, Instruction, Program

_NOTHING = hlo.FREE | {"add-dependency", "after-all", "domain", "opt-barrier", "partition-id", "replica-id"}
"""Opcodes that move no bytes."""
_MOVES = frozenset({*COLLECTIVES, "copy", "recv", "send", "slice"})
"""Operations that run beside others from their start to their end; both ends move a part of the bytes."""
_CHAIN = "chain_id="
"""What XLA:TPU writes at each part of an exchange that goes on while other things are computed (`collectives`)."""


def accessed(instruction: Instruction, computation: Computation, program: Program) -> int:
    """Return the bytes that an instruction reads and writes, without the computations that it calls to run."""
    opcode, result = instruction.operation, instruction.result
    if opcode in _NOTHING:
        return 0
    if opcode == "fusion":
        return _fusion(instruction, program.computations[instruction.called], program)
    operands = [computation.instructions[name].type for name in instruction.operands]
    if opcode.endswith(("-done", "-update")):
        return _size(result) if opcode.removesuffix("-done") in _MOVES else 0
    if opcode != instruction.opcode and opcode in _MOVES:
        # The end writes what this reads.
        return _part(result, operands[0]) if opcode == "slice" else sum(map(_size, operands))
    match opcode:
        case "dynamic-slice" | "slice":
            return _part(result, operands[0]) + _size(result) + sum(map(_size, operands[1:]))
        case "gather":
            return _part(result, operands[0]) + _size(result) + _size(operands[1])
        case "dynamic-update-slice":
            return _part(operands[1], result) + sum(map(_size, operands[1:]))
        case "scatter":
            indices, *updates = operands[len(operands) // 2 :]
            return _size(indices) + sum(2 * _part(update, result) + _size(update) for update in updates)
        case "custom-call":
            return _custom_call(instruction, operands)
    return _size(result) + sum(map(_size, operands))


def _custom_call(instruction: Instruction, operands: list[str]) -> int:
    match = operations.TARGET.search(instruction.attributes)
    target = match[1] if match else ""
    if target in operations.NAMES:
        return 0
    if target.startswith("X64Split"):
        return sum(map(_size, operands)) // 2 + _size(instruction.result)
    estimate = operations.estimate(instruction, "bytes_accessed")
    # The second result of cuBLAS and cuDNN is memory to work in.
    results = hlo.elements(instruction.result)[: 1 if target.startswith("__cu") else None]
    return sum(map(_size, [*operands, *results])) if estimate is None else estimate


def _fusion(instruction: Instruction, inside: Computation, program: Program) -> int:
    root = inside.root
    match = operations.TARGET.search(root.attributes) if root.opcode == "custom-call" else None
    if match and match[1] == "AsyncCollectiveStart":
        return sum(_size(parameter.type) for parameter in inside.parameters)  # its end writes
    if match and match[1] == "AsyncCollectiveDone":
        return _size(instruction.result)
    read = sum(_read(parameter.name, inside, program) for parameter in inside.parameters)
    read += sum(_size(i.type) for i in inside.instructions.values() if i.opcode == "constant" and hlo.dims(i.type))
    if root.opcode != "tuple":
        return read + _written(root, instruction.result, inside)
    pairs = zip(root.operands, hlo.parts(instruction.result), strict=True)
    return read + sum(_written(inside.instructions[name], type_, inside) for name, type_ in pairs)


def _written(result: Instruction, type_: str, inside: Computation) -> int:
    """The bytes of a fusion's result that are written; `type_` says where it lies."""
    result = _same(result, inside)
    if result.opcode == "parameter" or _CHAIN in result.attributes:
        return 0  # it is there
    update = _update(result, inside)
    return min(_part(update, type_), _size(type_)) if update else _size(type_)


def _update(instruction: Instruction, inside: Computation) -> str:
    """The type of the update that an instruction writes into an operand; "" if it writes a new array."""
    if instruction.opcode == "dynamic-update-slice":
        return inside.instructions[instruction.operands[1]].type
    return (
        inside.instructions[instruction.operands[len(instruction.operands) // 2 + 1]].type
        if instruction.opcode == "scatter"
        else ""
    )


def _read(name: str, inside: Computation, program: Program) -> int:
    """The bytes of an array that the instructions of a fusion read; they share a read of the whole."""
    whole = _size(inside.instructions[name].type)
    if not whole:
        return 0
    return min(sum(_read_by(user, name, inside, program) for user in inside.users.get(name, ())), whole)


def _read_by(user: Instruction, name: str, inside: Computation, program: Program) -> int:
    into = user.operands[0] == name
    match user.opcode:
        case "slice" | "dynamic-slice" | "gather" if into:
            return hlo.size(user.type)
        case "dynamic-update-slice" if into:
            return 0
        case "scatter" if into:
            return hlo.size(_update(user, inside))
        case "bitcast" | "get-tuple-element":
            return _read(user.name, inside, program)
        case "tuple":
            return 0
        case "fusion":
            nested, total = program.computations[user.called], 0
            for parameter in (nested.parameters[i] for i, operand in enumerate(user.operands) if operand == name):
                same = _same(nested.root, nested) == parameter
                total += _read(user.name, inside, program) if same else _read(parameter.name, nested, program)
            return total
    return 0 if _CHAIN in user.attributes else hlo.size(inside.instructions[name].type)


def _same(instruction: Instruction, inside: Computation) -> Instruction:
    """The array behind bitcasts."""
    while instruction.opcode == "bitcast":
        instruction = inside.instructions[instruction.operands[0]]
    return instruction


def _part(part: str, whole: str) -> int:
    """The bytes of a part of an array, if that is in main memory."""
    return hlo.size(part) if _size(whole) else 0


@functools.lru_cache(maxsize=2**16)
def _size(type_: str) -> int:
    """The bytes of those arrays of a type that are in main memory."""
    return sum(hlo.size(array) for array in hlo.elements(type_) if hlo.in_main_memory(array))
