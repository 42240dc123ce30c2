"""The bytes of an `Exported`: the flatbuffers schema of `jax.export`, read and written without JAX.

Slot numbers are those of jax/_src/export/serialization.fbs, enumerations are its values. What is written is version 11
of it, as the pinned JAX does: with the lists of avals and shardings that older readers want (before April 2026).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import flatbuffers
from flatbuffers import number_types as types
from jaxlib import xla_client

from stagec.core.avals import Aval, parse_aval
from stagec.core.trees import LEAF, Tree
from stagec.stages.artifact import Artifact, OneSharding
from stagec.stages.errors import NotExported
from stagec.stages.shardings import AXIS_TYPES, AbstractDevice, Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")
A = TypeVar("A", bound=Artifact)

# enum DType, by value.
# fmt: off
_DTYPES = (
    "bool", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f16", "f32", "f64", "c64", "c128", "bf16",
    "i4", "u4", "f8_e4m3b11fnuz", "f8_e4m3fn", "f8_e4m3fnuz", "f8_e5m2", "f8_e5m2fnuz", "f0",
    "f8_e4m3", "f8_e3m4", "f8_e8m0fnu", "f4_e2m1fn", "key<fry>", "key<rbg>", "key<urbg>",
)
# fmt: on
# enum DisabledSafetyCheckKind.
_CHECKS = ("platform", "custom_call", "shape_assertions")
# enum PyTreeDefKind.
_KINDS = ("leaf", "none", "tuple", "list", "dict", "custom")
# enum MemorySpace; 0 is not written.
DEVICE_MEMORY = 1
# The value of the field serialization_version: readers before December 2025 accept 2 and 3 alone, so JAX writes it too.
_VERSION = 3
_DEEPEST = 100
"""Levels of a tree, as in JSON (`strict_json.DEEPEST`)."""


def read(kind: type[A], serialized: bytes) -> A:
    """Read what `jax.export.Exported.serialize` wrote, as a `kind`. Raises NotExported when it is something else."""
    try:
        return _read_exported(kind, _Table.root(serialized))
    # flatbuffers checks nothing: what a wrong offset raises depends on where it points.
    except (ValueError, IndexError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise NotExported(f"not a serialized jax.export.Exported ({error or type(error).__name__})") from error


def write(exported: Artifact, vjp_order: int) -> bytes:
    """Return the bytes of `exported` with `vjp_order` orders of its vector-Jacobian products.

    Raises ValueError when it has fewer, or a dtype that the format does not have.
    """
    builder = flatbuffers.Builder(len(exported.mlir_module_serialized) + 4096)
    builder.Finish(_Writer(builder).exported(exported, vjp_order))
    return bytes(builder.Output())


class _Budget:
    """How much may still be read of a buffer.

    Offsets may point to one place from many others, which makes a small file a large value. What writers store is read
    once, so all that is read has no more bytes than the file.
    """

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ValueError("more is to be read than the file has")


class _Table:
    """One flatbuffers table; a slot is the position of the field in the schema."""

    def __init__(self, buffer: bytes, position: int, budget: _Budget) -> None:
        budget.take(4)  # its own offset to its vtable
        if not 0 <= position <= len(buffer):
            raise ValueError("an offset points outside of the file")
        self._table = flatbuffers.table.Table(buffer, position)
        self._budget = budget

    @staticmethod
    def root(buffer: bytes) -> _Table:
        start = flatbuffers.encode.Get(types.UOffsetTFlags.packer_type, buffer, 0)
        return _Table(buffer, start, _Budget(len(buffer)))

    def has(self, slot: int) -> bool:
        return bool(self._table.Offset(4 + 2 * slot))

    def scalar(self, slot: int, kind: Any, default: Any = 0) -> Any:
        offset = self._table.Offset(4 + 2 * slot)
        return self._table.Get(kind, self._table.Pos + offset) if offset else default

    def blob(self, slot: int) -> bytes:
        offset = self._table.Offset(4 + 2 * slot)
        return self._blob(self._table.Pos + offset) if offset else b""

    def text(self, slot: int) -> str:
        return self.blob(slot).decode("utf-8")

    def table(self, slot: int) -> _Table | None:
        offset = self._table.Offset(4 + 2 * slot)
        return self._table_at(self._table.Pos + offset) if offset else None

    def required(self, slot: int) -> _Table:
        table = self.table(slot)
        if table is None:
            raise ValueError(f"field {slot} is missing")
        return table

    def tables(self, slot: int) -> list[_Table]:
        return [self._table_at(at) for at in self._elements(slot, 4)]

    def texts(self, slot: int) -> list[str]:
        return [self._blob(at).decode("utf-8") for at in self._elements(slot, 4)]

    def scalars(self, slot: int, kind: Any) -> list[Any]:
        return [self._table.Get(kind, at) for at in self._elements(slot, kind.bytewidth)]

    def _elements(self, slot: int, width: int) -> Iterator[int]:
        offset = self._table.Offset(4 + 2 * slot)
        if not offset:
            return iter(())
        start, length = self._table.Vector(offset), self._table.VectorLen(offset)
        if start + width * length > len(self._table.Bytes):
            raise ValueError("a vector runs over the end")
        self._budget.take(width * length)
        return iter(range(start, start + width * length, width))

    def _table_at(self, at: int) -> _Table:
        return _Table(self._table.Bytes, self._table.Indirect(at), self._budget)

    def _blob(self, at: int) -> bytes:
        start = at + self._table.Get(types.UOffsetTFlags, at)
        length = self._table.Get(types.UOffsetTFlags, start)
        if start + 4 + length > len(self._table.Bytes):
            raise ValueError("a text runs over the end")
        self._budget.take(length)
        return bytes(self._table.Bytes[start + 4 : start + 4 + length])


def _read_exported(kind: type[A], table: _Table) -> A:
    # Since version 10 avals, meshes and shardings are stored once and named by index; older bytes list them.
    unique_avals = [_read_aval(aval) for aval in table.tables(19)]
    unique_meshes = [_read_mesh(mesh) for mesh in table.tables(20)]
    unique_shardings = [_read_named_sharding(sharding, unique_meshes) for sharding in table.tables(21)]

    def avals(indices_slot: int, plain_slot: int) -> list[tuple[Aval, int]]:
        indices = table.scalars(indices_slot, types.Uint32Flags)
        return [unique_avals[i] for i in indices] or list(map(_read_aval, table.tables(plain_slot)))

    def shardings(indices_slot: int, plain_slot: int) -> tuple[OneSharding, ...]:
        indices = table.scalars(indices_slot, types.Uint32Flags)
        named = tuple(unique_shardings[i - 1] if i else None for i in indices)
        return named or tuple(_read_sharding(s, unique_meshes) for s in table.tables(plain_slot))

    in_tree, out_tree = _read_tree(table.required(2)), _read_tree(table.required(4))
    in_avals, out_avals = avals(22, 3), avals(23, 5)
    if in_tree.num_leaves != len(in_avals) or out_tree.num_leaves != len(out_avals):
        raise ValueError("trees and avals do not agree")
    in_shardings, out_shardings = shardings(24, 7), shardings(25, 8)
    memory_spaces = tuple(space for _, space in (*in_avals, *out_avals))
    vjp = table.table(17)
    exported = kind(
        fun_name=table.text(1),
        in_tree=in_tree,
        in_avals=tuple(aval for aval, _ in in_avals),
        out_tree=out_tree,
        out_avals=tuple(aval for aval, _ in out_avals),
        # A 32-bit field since serialization version 5.
        nr_devices=table.scalar(18, types.Uint32Flags) or table.scalar(6, types.Int16Flags),
        platforms=tuple(table.texts(9)),
        ordered_effects=tuple(effect.text(0) for effect in table.tables(10)),
        unordered_effects=tuple(effect.text(0) for effect in table.tables(11)),
        disabled_safety_checks=tuple(map(_read_check, table.tables(12))),
        mlir_module_serialized=table.blob(13),
        calling_convention_version=table.scalar(14, types.Uint16Flags),
        module_kept_var_idx=tuple(table.scalars(15, types.Uint16Flags)),
        uses_global_constants=table.scalar(16, types.BoolFlags, False),
        _in_shardings=in_shardings or (None,) * len(in_avals),
        _out_shardings=out_shardings or (None,) * len(out_avals),
        _memory_spaces=() if set(memory_spaces) <= {DEVICE_MEMORY} else memory_spaces,
        _vjp=_read_exported(kind, vjp) if vjp else None,
    )
    _check(exported)
    return exported


def _check(exported: Artifact) -> None:
    """Raise ValueError where fields do not belong together; offsets that were changed often give such values."""
    count, kept = len(exported.in_avals), exported.module_kept_var_idx
    if list(kept) != sorted({index for index in kept if index < count}):
        raise ValueError("the indices of kept arguments are not sorted, or there are fewer arguments")
    if len(exported._in_shardings) != count or len(exported._out_shardings) != len(exported.out_avals):
        raise ValueError("shardings and avals do not agree")
    if not exported.platforms or exported.nr_devices < 1:
        raise ValueError("it is for no platform, or for no device")
    if any(space < 0 for space in exported._memory_spaces):
        raise ValueError("unknown memory space")


def _read_tree(table: _Table, depth: int = 0) -> Tree:
    if depth > _DEEPEST:
        raise ValueError(f"a tree is nested deeper than {_DEEPEST} levels")
    children = tuple(_read_tree(child, depth + 1) for child in table.tables(1))
    match table.scalar(0, types.Int8Flags):
        case 0:
            return LEAF
        case 1:
            return Tree("none")
        case 2:
            return Tree("tuple", children)
        case 3:
            return Tree("list", children)
        case 4:
            return Tree("dict", children, tuple(table.texts(2)))
        case 5:
            return Tree("custom", children, (), table.text(3), table.blob(4))
        case kind:
            raise ValueError(f"unknown kind of tree node {kind}")


def _read_aval(table: _Table) -> tuple[Aval, int]:
    """Return the aval and its memory space."""
    dtype = _named(_DTYPES, table.scalar(2, types.Int8Flags))
    # JAX writes a dimension as it prints it; parse_aval brings it to one spelling.
    aval = parse_aval(f"{dtype}[{','.join(table.texts(1))}]")
    return aval, table.scalar(3, types.Int8Flags) or DEVICE_MEMORY


def _named(names: Sequence[str], value: int) -> str:
    """Return the name of a value of an enumeration."""
    if not 0 <= value < len(names):
        raise ValueError(f"unknown value {value} of an enumeration")
    return names[value]


def _read_check(table: _Table) -> str:
    kind, target = _named(_CHECKS, table.scalar(0, types.Int8Flags)), table.text(1)
    return f"{kind}:{target}" if target else kind


def _read_mesh(table: _Table) -> Mesh:
    device = table.table(3)
    return Mesh(
        tuple(table.scalars(0, types.Uint32Flags)),
        tuple(table.texts(1)),
        tuple(_named(AXIS_TYPES, kind - 1) for kind in table.scalars(2, types.Int8Flags)),
        AbstractDevice(device.text(0), device.scalar(1, types.Uint32Flags, None), device.text(2)) if device else None,
    )


def _read_named_sharding(table: _Table, meshes: Sequence[Mesh]) -> NamedSharding:
    mesh = meshes[table.scalar(3, types.Uint32Flags)] if meshes else _read_mesh(table.required(0))
    spec = table.required(1)
    return NamedSharding(
        mesh,
        PartitionSpec(
            *(axes.texts(0) for axes in spec.tables(0)),
            unreduced=spec.texts(2),
            reduced=spec.texts(1),
        ),
        table.text(2) or None,
    )


def _read_sharding(table: _Table, meshes: Sequence[Mesh]) -> OneSharding:
    named = table.table(2)
    if named is not None:
        return _read_named_sharding(named, meshes)
    # Before version 6, January 2026, XLA's own form was stored; that of a replicated array has no bytes.
    if not table.has(1):
        return None
    proto = xla_client.OpSharding()
    proto.ParseFromString(table.blob(1))
    try:
        return xla_client.HloSharding.from_proto(proto)
    except Exception as error:  # XLA's status, by version RuntimeError or JaxRuntimeError
        raise ValueError(f"not a sharding of XLA's: {error}") from error


class _Writer:
    """Writes tables bottom-up, as flatbuffers wants them; each method returns the offset of what it wrote."""

    def __init__(self, builder: flatbuffers.Builder) -> None:
        self._builder = builder

    def exported(self, exported: Artifact, vjp_order: int) -> int:
        builder = self._builder
        if vjp_order > 0 and not exported.has_vjp():
            raise ValueError(
                f"{exported.fun_name} has no vector-Jacobian product of an order that high; "
                f"export it with one, or write a smaller vjp_order"
            )
        spaces = exported._memory_spaces or (DEVICE_MEMORY,) * (len(exported.in_avals) + len(exported.out_avals))
        count = len(exported.in_avals)
        in_avals = list(zip(exported.in_avals, spaces[:count], strict=True))
        out_avals = list(zip(exported.out_avals, spaces[count:], strict=True))
        both = (*exported._in_shardings, *exported._out_shardings)
        named = list(dict.fromkeys(s for s in both if isinstance(s, NamedSharding)))
        meshes = list(dict.fromkeys(s.mesh for s in named))
        # JAX writes avals that differ in weak_type alone once.
        avals = {aval: i for i, aval in enumerate(dict.fromkeys((*in_avals, *out_avals)))}
        number = {sharding: i for i, sharding in enumerate(named, 1)}

        def sharding_indices(shardings: Iterable[OneSharding]) -> int:
            return self._scalars([0 if s is None else number[s] for s in shardings], 4, "PrependUint32")

        fields: list[tuple[int, str, Any, Any]] = [
            (0, "PrependUint16Slot", _VERSION, 0),
            (1, "", builder.CreateString(exported.fun_name), 0),
            (2, "", self._tree(exported.in_tree), 0),
            (3, "", self._tables(self._aval, in_avals), 0),
            (4, "", self._tree(exported.out_tree), 0),
            (5, "", self._tables(self._aval, out_avals), 0),
            (7, "", self._tables(lambda s: self._sharding(s, meshes), exported._in_shardings), 0),
            (8, "", self._tables(lambda s: self._sharding(s, meshes), exported._out_shardings), 0),
            (9, "", self._texts(exported.platforms), 0),
            (10, "", self._tables(self._effect, exported.ordered_effects), 0),
            (11, "", self._tables(self._effect, exported.unordered_effects), 0),
            (12, "", self._tables(self._check, exported.disabled_safety_checks), 0),
            (13, "", builder.CreateByteVector(exported.mlir_module_serialized), 0),
            (14, "PrependUint16Slot", exported.calling_convention_version, 0),
            (15, "", self._scalars(exported.module_kept_var_idx, 2, "PrependUint16"), 0),
            (16, "PrependBoolSlot", exported.uses_global_constants, False),
            (18, "PrependUint32Slot", exported.nr_devices, 0),
        ]
        if vjp_order > 0:
            fields.append((17, "", self.exported(exported.vjp(), vjp_order - 1), 0))
        # A file of the time of XLA's own form stays one: its readers take the lists.
        if all(s is None or isinstance(s, NamedSharding) for s in both):
            fields += [
                (19, "", self._tables(self._aval, avals), 0),
                (20, "", self._tables(self._mesh, meshes), 0),
                (21, "", self._tables(lambda s: self._named_sharding(s, meshes), named), 0),
                (22, "", self._scalars([avals[aval] for aval in in_avals], 4, "PrependUint32"), 0),
                (23, "", self._scalars([avals[aval] for aval in out_avals], 4, "PrependUint32"), 0),
                (24, "", sharding_indices(exported._in_shardings), 0),
                (25, "", sharding_indices(exported._out_shardings), 0),
            ]
        return self._table(26, fields)

    def _tree(self, tree: Tree) -> int:
        fields: list[tuple[int, str, Any, Any]] = [(0, "PrependInt8Slot", _KINDS.index(tree.kind), 0)]
        if tree.children:
            fields.append((1, "", self._tables(self._tree, tree.children), 0))
        if tree.kind == "dict":
            fields.append((2, "", self._texts(tree.keys), 0))
        if tree.kind == "custom":
            fields.append((3, "", self._builder.CreateString(tree.name), 0))
            fields.append((4, "", self._builder.CreateByteVector(tree.auxdata), 0))
        return self._table(5, fields)

    def _aval(self, aval_and_space: tuple[Aval, int]) -> int:
        aval, space = aval_and_space
        if aval.dtype not in _DTYPES:
            raise ValueError(f"the format of jax.export has no dtype {aval.dtype}; cast {aval} to another")
        return self._table(
            4,
            [
                (1, "", self._texts([str(dim) for dim in aval.shape]), 0),
                (2, "PrependInt8Slot", _DTYPES.index(aval.dtype), 0),
                (3, "PrependInt8Slot", space, 0),
            ],
        )

    def _sharding(self, sharding: OneSharding, meshes: Sequence[Mesh]) -> int:
        if sharding is None:
            return self._table(3, [])
        if isinstance(sharding, NamedSharding):
            return self._table(3, [(2, "", self._named_sharding(sharding, meshes), 0)])
        serialized = self._builder.CreateByteVector(sharding.to_proto().SerializeToString())
        return self._table(3, [(0, "PrependInt8Slot", 1, 0), (1, "", serialized, 0)])

    def _named_sharding(self, sharding: NamedSharding, meshes: Sequence[Mesh]) -> int:
        spec = sharding.spec
        partitions = self._tables(lambda axes: self._table(1, [(0, "", self._texts(axes), 0)]), spec.partitions)
        reduced, unreduced = self._texts(spec.reduced), self._texts(spec.unreduced)
        fields: list[tuple[int, str, Any, Any]] = [
            (0, "", self._mesh(sharding.mesh), 0),
            (1, "", self._table(3, [(0, "", partitions, 0), (1, "", reduced, 0), (2, "", unreduced, 0)]), 0),
            (3, "PrependUint32Slot", meshes.index(sharding.mesh), 0),
        ]
        if sharding.memory_kind is not None:
            fields.append((2, "", self._builder.CreateString(sharding.memory_kind), 0))
        return self._table(4, fields)

    def _mesh(self, mesh: Mesh) -> int:
        fields: list[tuple[int, str, Any, Any]] = [
            (0, "", self._scalars(mesh.axis_sizes, 4, "PrependUint32"), 0),
            (1, "", self._texts(mesh.axis_names), 0),
            (2, "", self._scalars([1 + AXIS_TYPES.index(kind) for kind in mesh.axis_types], 1, "PrependByte"), 0),
        ]
        if mesh.abstract_device is not None:
            device = mesh.abstract_device
            kind = (0, "", self._builder.CreateString(device.device_kind), 0)
            platform = (2, "", self._builder.CreateString(device.platform), 0)
            cores = [] if device.num_cores is None else [(1, "PrependUint32Slot", device.num_cores, None)]
            fields.append((3, "", self._table(3, [kind, *cores, platform]), 0))
        return self._table(4, fields)

    def _effect(self, name: str) -> int:
        return self._table(1, [(0, "", self._builder.CreateString(name), 0)])

    def _check(self, check: str) -> int:
        kind, _, target = check.partition(":")
        fields: list[tuple[int, str, Any, Any]] = [(0, "PrependInt8Slot", _CHECKS.index(kind), 0)]
        if target:
            fields.append((1, "", self._builder.CreateString(target), 0))
        return self._table(2, fields)

    def _table(self, slots: int, fields: Iterable[tuple[int, str, Any, Any]]) -> int:
        """Write a table of fields (slot, the builder's method for a scalar or "" for an offset, value, default)."""
        self._builder.StartObject(slots)
        for slot, method, value, default in fields:
            getattr(self._builder, method or "PrependUOffsetTRelativeSlot")(slot, value, default)
        return int(self._builder.EndObject())

    def _tables(self, one: Callable[[T], int], values: Iterable[T]) -> int:
        return self._offsets([one(value) for value in values])

    def _texts(self, texts: Iterable[str]) -> int:
        return self._offsets([self._builder.CreateString(text) for text in texts])

    def _offsets(self, offsets: Sequence[int]) -> int:
        self._builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self._builder.PrependUOffsetTRelative(offset)
        return int(self._builder.EndVector())

    def _scalars(self, values: Sequence[int], width: int, method: str) -> int:
        self._builder.StartVector(width, len(values), width)
        for value in reversed(values):
            getattr(self._builder, method)(value)
        return int(self._builder.EndVector())
