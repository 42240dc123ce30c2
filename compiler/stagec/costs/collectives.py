"""The instructions of an optimized program that exchange arrays between devices: the devices and the bytes."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stagec.core.builds.specs import COLLECTIVES
from stagec.costs import hlo
from stagec.costs.hlo import Computation, Instruction

_IDS = r"(?:\[[\d,]*\](?:T\([\d,]*\))?|[\d,]*)"
_MESH = rf"mesh\[[^\]]*\](?:, device_ids=\({_IDS}\))? \{{[^}}]*\}}"
_LISTED = r"\{[{}\d, ]*\}"
_GROUPS = re.compile(rf" replica_groups=({_MESH}|\[[\d,]*\]<={_IDS}|{_LISTED})")
_PAIRS = re.compile(rf"source_target_pairs=\"?({_LISTED})")
_INNER = re.compile(r"\{([\d, ]+)\}")
_AXIS, _AXES = re.compile(r"'([^']*)'=(\d+)"), re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_CHAIN = re.compile(r' channel_id=(\d+).* frontend_attributes=\{[^}]*chain_id="(\d+)"')


class Exchange(NamedTuple):
    """An exchange of arrays between devices.

    kind: one of `COLLECTIVES`. bytes: of the arrays on one device before it, or after an all-gather, which is when they
    are whole. among: which devices, as XLA writes it (`groups`); "" where that cannot be read. chain: what parts of one
    exchange have in common; "" where it is whole.
    """

    kind: str
    bytes: int
    among: str
    chain: str = ""


def exchange(instruction: Instruction, computation: Computation, fused: bool) -> Exchange | None:
    """Return the exchange of an instruction of `computation`; None if there is none, and for the end of an exchange.

    fused: whether the computation is a fusion's. XLA:TPU writes some exchanges with fusions. If each device takes only
    its part of an all-reduce, that is a reduce-scatter. An all-gather that goes on while other things are computed is
    in parts, in several fusions with a number in common.
    """
    kind = instruction.operation
    if kind not in COLLECTIVES and not (kind == "send" and _PAIRS.search(instruction.attributes)):
        return None
    operands = instruction.operands[:1] if kind.startswith(("ragged", "send")) else instruction.operands
    before = sum(hlo.size(computation.instructions[name].type, padded=False) for name in operands)
    # The start of an all-gather has its operands beside its results.
    after = hlo.size(instruction.type, padded=False) - (before if instruction.opcode.endswith("-start") else 0)
    if kind == "all-reduce" and fused and _is_scattered(instruction, computation):
        kind = "reduce-scatter"
    pairs = _PAIRS.search(instruction.attributes)
    if kind == "collective-permute" and not (pairs and _INNER.search(pairs[1])):
        return None
    groups_match = pairs or _GROUPS.search(instruction.attributes)
    # Without groups an exchange is among all; with groups in a form that is not known, nothing is said of it.
    every = "" if "_groups=" in instruction.attributes else "{}"
    chain = _CHAIN.search(instruction.attributes)
    return Exchange(
        "collective-permute" if kind == "send" else kind,
        after if kind == "all-gather" else before,
        groups_match[1] if groups_match else every,
        f"{chain[1]} {chain[2]}" if chain and fused else "",
    )


def _is_scattered(instruction: Instruction, computation: Computation) -> bool:
    users = computation.users.get(instruction.name, ())
    return bool(users) and all(
        user.opcode == "dynamic-slice" and user.operands[0] == instruction.name for user in users
    )


def sent_bytes(exchange: Exchange, devices: int) -> int:
    """Return the least bytes that the busiest device sends, in rings like NCCL's and XLA's.

    devices: of the program.
    """
    if exchange.kind == "collective-permute":
        return exchange.bytes if any(source != target for source, target in groups(exchange.among, devices)) else 0
    size = max(map(len, groups(exchange.among, devices)), default=1)
    if exchange.kind == "collective-broadcast":
        return exchange.bytes if size > 1 else 0
    return (2 if exchange.kind == "all-reduce" else 1) * exchange.bytes * (size - 1) // size


@functools.lru_cache(maxsize=256)
def groups(among: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Return groups of devices that exchange arrays, or pairs of source and target, by the numbers of their partitions.

    among: what XLA writes: a list of groups `{{0,1},{2,3}}` (`{}` is all devices); groups of an array of numbers that
    is transposed, `[2,2]<=[2,2]T(1,0)`; or axes of a mesh, `mesh['x'=2,'y'=4] {'x','y':(2)2}`, where `(2)2` is a part
    of an axis: 2, behind 2 that are left of it. A mesh may say in which order the devices are.
    (https://openxla.org/xla/operation_semantics#allgather, xla/hlo/ir/replica_group.h)
    """
    if among.startswith("{"):
        listed = tuple(tuple(map(int, group.split(","))) for group in _INNER.findall(among))
        return listed or (tuple(range(devices)),)
    if among.startswith("["):
        shape, _, ids = among.partition("<=")
        size = _numbers(shape)[-1]
        flat = _ids(ids)
        return tuple(tuple(flat[i : i + size]) for i in range(0, len(flat), size))
    return _of_mesh(among)


def _of_mesh(among: str) -> tuple[tuple[int, ...], ...]:
    """The groups along axes of a mesh."""
    mesh, _, axes = among.rpartition(" {")
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh.partition("]")[0])}
    parts = [(name, int(left or 1), int(size or sizes[name])) for name, left, size in _AXES.findall(axes)]
    dims: list[int] = []  # of the mesh, with each axis split into its parts
    position: dict[tuple[str, int, int], int] = {}
    for name, size in sizes.items():
        done = 1
        for part in sorted(part for part in parts if part[0] == name):
            _, left, along = part
            position[part] = len(dims) + 1
            dims += [left // done, along]
            done = left * along
        dims.append(size // done)
    inside = [position[part] for part in parts]
    outside = [axis for axis in range(len(dims)) if axis not in inside]
    ids = mesh.partition("device_ids=(")[2].removesuffix(")")
    flat = transposed(_ids(ids) if ids else range(math.prod(dims)), dims, [*outside, *inside])
    along = math.prod(dims[axis] for axis in inside)
    return tuple(tuple(flat[i : i + along]) for i in range(0, len(flat), along))


def axes(kind: str, among: str, sizes: Mapping[str, int]) -> str:
    """Return the mesh axes along which devices exchange arrays, "data, model"; "" if the groups are not whole rows.

    kind, among: of an `Exchange`. sizes: of the axes, in order; devices are counted row by row.
    """
    exchanging = groups(among, math.prod(sizes.values())) if among and sizes else ()
    if not exchanging:
        return ""
    strides = [math.prod(list(sizes.values())[i + 1 :]) for i in range(len(sizes))]
    varying = [
        name
        for (name, size), stride in zip(sizes.items(), strides, strict=True)
        if any(len({member // stride % size for member in group}) > 1 for group in exchanging)
    ]
    size = math.prod(sizes[name] for name in varying)
    if kind != "collective-permute" and any(len(group) != size for group in exchanging):
        return ""
    return ", ".join(varying)


def _ids(text: str) -> list[int]:
    """Numbers of devices: a list, or those of an array of that shape, `[4,4]T(1,0)`, with its axes in another order."""
    if not text.startswith("["):
        return _numbers(text)
    shape, _, axes = text.partition("T")
    dims = _numbers(shape)
    return transposed(range(math.prod(dims)), dims, _numbers(axes) or range(len(dims)))


def transposed(flat: Sequence[int], dims: Sequence[int], axes: Sequence[int]) -> list[int]:
    """Return an array of shape `dims`, given row by row, with its axes in another order."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    coords = itertools.product(*(range(dims[axis]) for axis in axes))
    return [flat[sum(i * strides[axis] for i, axis in zip(position, axes, strict=True))] for position in coords]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
