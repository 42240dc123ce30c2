"""The bytes of an `Exported`: the flatbuffers schema of `jax.export`, read and written without JAX.

Slots and enumerations are those of `export_schema`. What is written is version 11 of JAX's schema, as the pinned JAX
writes it: with the lists of avals and shardings that older readers want (before April 2026).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import flatbuffers
from flatbuffers import number_types as types
from jaxlib import xla_client

from stagec.core.sizes.avals import Aval, parse_aval
from stagec.core.trees.keyed import Item, with_keys
from stagec.core.trees.tree import LEAF, Tree
from stagec.stages import export_schema as schema
from stagec.stages.errors import NotExported
from stagec.stages.export_schema import CHECKS, DEVICE_MEMORY, DTYPES, KINDS
from stagec.stages.shardings import AXIS_TYPES, AbstractDevice, Mesh, NamedSharding, OneSharding, PartitionSpec

if TYPE_CHECKING:
    from stagec.stages.exported import Exported

T = TypeVar("T")

# The value of the field serialization_version: readers before December 2025 accept 2 and 3 alone, so JAX writes it too.
_VERSION = 3
_DEEPEST = 100
"""Levels of a tree, as in JSON (`strict_json.DEEPEST`)."""
_DICT = "builtins:dict"
"""Name of the custom node that is a dict with keys that are not strings: JAX's format has none."""


def read(kind: type[Exported], serialized: bytes) -> Exported:
    """Read what `jax.export.Exported.serialize` wrote, as a `kind`. Raises NotExported when it is something else."""
    try:
        return _read_exported(kind, _Table.root(serialized))
    # flatbuffers checks nothing: what a wrong offset raises depends on where it points.
    except (ValueError, IndexError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise NotExported(f"not a serialized jax.export.Exported ({error or type(error).__name__})") from error


def write(exported: Exported, vjp_order: int) -> bytes:
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
            raise ValueError("an offset points outside the file")
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

    def strings(self, slot: int) -> list[str]:
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
            raise ValueError("a string runs over the end")
        self._budget.take(length)
        return bytes(self._table.Bytes[start + 4 : start + 4 + length])


def _read_exported(kind: type[Exported], table: _Table) -> Exported:
    slots = schema.Exported
    # Since version 10 avals, meshes and shardings are stored once and named by index; older bytes list them.
    unique_avals = [_read_aval(aval) for aval in table.tables(slots.UNIQUE_AVALS)]
    unique_meshes = [_read_mesh(mesh) for mesh in table.tables(slots.UNIQUE_ABSTRACT_MESHES)]
    unique_shardings = [
        _read_named_sharding(sharding, unique_meshes) for sharding in table.tables(slots.UNIQUE_NAMED_SHARDINGS)
    ]

    def avals(indices_slot: int, plain_slot: int) -> list[tuple[Aval, int]]:
        indices = table.scalars(indices_slot, types.Uint32Flags)
        return [unique_avals[i] for i in indices] or list(map(_read_aval, table.tables(plain_slot)))

    def shardings(indices_slot: int, plain_slot: int) -> tuple[OneSharding, ...]:
        indices = table.scalars(indices_slot, types.Uint32Flags)
        named = tuple(unique_shardings[i - 1] if i else None for i in indices)
        return named or tuple(_read_sharding(s, unique_meshes) for s in table.tables(plain_slot))

    in_tree, out_tree = _read_tree(table.required(slots.IN_TREE)), _read_tree(table.required(slots.OUT_TREE))
    in_avals, out_avals = avals(slots.IN_AVALS_IDXS, slots.IN_AVALS), avals(slots.OUT_AVALS_IDXS, slots.OUT_AVALS)
    if in_tree.num_leaves != len(in_avals) or out_tree.num_leaves != len(out_avals):
        raise ValueError("trees and avals do not agree")
    in_shardings, out_shardings = (
        shardings(slots.IN_SHARDINGS_IDXS, slots.IN_SHARDINGS),
        shardings(slots.OUT_SHARDINGS_IDXS, slots.OUT_SHARDINGS),
    )
    memory_spaces = tuple(space for _, space in (*in_avals, *out_avals))
    vjp = table.table(slots.VJP)
    exported = kind(
        fun_name=table.text(slots.FUNCTION_NAME),
        in_tree=in_tree,
        in_avals=tuple(aval for aval, _ in in_avals),
        out_tree=out_tree,
        out_avals=tuple(aval for aval, _ in out_avals),
        # A 32-bit field since serialization version 5.
        nr_devices=table.scalar(slots.NR_DEVICES, types.Uint32Flags)
        or table.scalar(slots.NR_DEVICES_SHORT, types.Int16Flags),
        platforms=tuple(table.strings(slots.PLATFORMS)),
        ordered_effects=tuple(effect.text(schema.Effect.TYPE_NAME) for effect in table.tables(slots.ORDERED_EFFECTS)),
        unordered_effects=tuple(
            effect.text(schema.Effect.TYPE_NAME) for effect in table.tables(slots.UNORDERED_EFFECTS)
        ),
        disabled_safety_checks=tuple(map(_read_check, table.tables(slots.DISABLED_CHECKS))),
        mlir_module_serialized=table.blob(slots.MLIR_MODULE_SERIALIZED),
        calling_convention_version=table.scalar(slots.CALLING_CONVENTION_VERSION, types.Uint16Flags),
        module_kept_var_idx=tuple(table.scalars(slots.MODULE_KEPT_VAR_IDX, types.Uint16Flags)),
        uses_global_constants=table.scalar(slots.USES_GLOBAL_CONSTANTS, types.BoolFlags, False),
        _in_shardings=in_shardings or (None,) * len(in_avals),
        _out_shardings=out_shardings or (None,) * len(out_avals),
        _memory_spaces=() if set(memory_spaces) <= {DEVICE_MEMORY} else memory_spaces,
        _vjp=_read_exported(kind, vjp) if vjp else None,
    )
    _check(exported)
    return exported


def _check(exported: Exported) -> None:
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
    slots = schema.PyTreeDef
    if depth > _DEEPEST:
        raise ValueError(f"a tree is nested deeper than {_DEEPEST} levels")
    children = tuple(_read_tree(child, depth + 1) for child in table.tables(slots.CHILDREN))
    match table.scalar(slots.KIND, types.Int8Flags):
        case 0:
            return LEAF
        case 1:
            return Tree("none")
        case 2:
            return Tree("tuple", children)
        case 3:
            return Tree("list", children)
        case 4:
            return Tree("dict", children, tuple(table.strings(slots.CHILDREN_NAMES)))
        case 5:
            name, auxdata = table.text(slots.CUSTOM_NAME), table.blob(slots.CUSTOM_AUXDATA)
            return _with_keys(Tree("custom", children, (), name, auxdata))
        case kind:
            raise ValueError(f"unknown kind of tree node {kind}")


def _with_keys(node: Tree) -> Tree:
    """Return a dict with keys that are not strings, which is a custom node for JAX's format; another node as it is."""
    keyed = node.keyed if node.name == _DICT else None
    if keyed is None or keyed.keys is None or any(type(key) is not Item for key in keyed.entries or ()):
        return node
    return Tree("dict", node.children, keyed.keys)


def _without_keys(tree: Tree) -> Tree:
    """Undo `_with_keys`."""
    if tree.kind != "dict" or all(type(key) is str for key in tree.keys):
        return tree
    return Tree("custom", tree.children, (), _DICT, with_keys(tree.keys).to_bytes())


def _read_aval(table: _Table) -> tuple[Aval, int]:
    """Return the aval and its memory space."""
    slots = schema.AbstractValue
    dtype = _named(DTYPES, table.scalar(slots.DTYPE, types.Int8Flags))
    # JAX writes a dimension as it prints it; parse_aval brings it to one spelling.
    aval = parse_aval(f"{dtype}[{','.join(table.strings(slots.SHAPE))}]")
    return aval, table.scalar(slots.MEMORY_SPACE, types.Int8Flags) or DEVICE_MEMORY


def _named(names: Sequence[str], value: int) -> str:
    """Return the name of a value of an enumeration."""
    if not 0 <= value < len(names):
        raise ValueError(f"unknown value {value} of an enumeration")
    return names[value]


def _read_check(table: _Table) -> str:
    slots = schema.DisabledSafetyCheck
    kind, target = _named(CHECKS, table.scalar(slots.KIND, types.Int8Flags)), table.text(slots.CUSTOM_CALL_TARGET)
    return f"{kind}:{target}" if target else kind


def _read_mesh(table: _Table) -> Mesh:
    slots = schema.AbstractMesh
    device = table.table(slots.ABSTRACT_DEVICE)
    return Mesh(
        tuple(table.scalars(slots.AXIS_SIZES, types.Uint32Flags)),
        tuple(table.strings(slots.AXIS_NAMES)),
        tuple(_named(AXIS_TYPES, kind - 1) for kind in table.scalars(slots.AXIS_TYPES, types.Int8Flags)),
        AbstractDevice(
            device.text(schema.AbstractDevice.DEVICE_KIND),
            device.scalar(schema.AbstractDevice.NUM_CORES, types.Uint32Flags, None),
            device.text(schema.AbstractDevice.PLATFORM),
        )
        if device
        else None,
    )


def _read_named_sharding(table: _Table, meshes: Sequence[Mesh]) -> NamedSharding:
    slots = schema.NamedSharding
    mesh = (
        meshes[table.scalar(slots.ABSTRACT_MESH_IDX, types.Uint32Flags)]
        if meshes
        else _read_mesh(table.required(slots.MESH))
    )
    spec = table.required(slots.SPEC)
    return NamedSharding(
        mesh,
        PartitionSpec(
            *(axes.strings(schema.PartitionSpecOneAxis.AXES) for axes in spec.tables(schema.PartitionSpec.PARTITIONS)),
            unreduced=spec.strings(schema.PartitionSpec.UNREDUCED),
            reduced=spec.strings(schema.PartitionSpec.REDUCED),
        ),
        table.text(slots.MEMORY_KIND) or None,
    )


def _read_sharding(table: _Table, meshes: Sequence[Mesh]) -> OneSharding:
    slots = schema.Sharding
    named = table.table(slots.NAMED_SHARDING)
    if named is not None:
        return _read_named_sharding(named, meshes)
    # Before version 6, January 2026, XLA's own form was stored; that of a replicated array has no bytes.
    if not table.has(slots.HLO_SHARDING_PROTO):
        return None
    proto = xla_client.OpSharding()
    proto.ParseFromString(table.blob(slots.HLO_SHARDING_PROTO))
    try:
        return xla_client.HloSharding.from_proto(proto)
    except Exception as error:  # XLA's status, by version RuntimeError or JaxRuntimeError
        raise ValueError(f"not a sharding that XLA wrote: {error}") from error


_Field: TypeAlias = tuple[int, str, Any, Any]
"""Slot of a field; the builder's method for a scalar, or "" for an offset; its value; and the default."""


class _Writer:
    """Writes tables bottom-up, as flatbuffers wants them; each method returns the offset of what it wrote."""

    def __init__(self, builder: flatbuffers.Builder) -> None:
        self._builder = builder

    def exported(self, exported: Exported, vjp_order: int) -> int:
        slots = schema.Exported
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

        fields: list[_Field] = [
            (slots.SERIALIZATION_VERSION, "PrependUint16Slot", _VERSION, 0),
            (slots.FUNCTION_NAME, "", builder.CreateString(exported.fun_name), 0),
            (slots.IN_TREE, "", self._tree(exported.in_tree), 0),
            (slots.IN_AVALS, "", self._tables(self._aval, in_avals), 0),
            (slots.OUT_TREE, "", self._tree(exported.out_tree), 0),
            (slots.OUT_AVALS, "", self._tables(self._aval, out_avals), 0),
            (slots.IN_SHARDINGS, "", self._tables(lambda s: self._sharding(s, meshes), exported._in_shardings), 0),
            (slots.OUT_SHARDINGS, "", self._tables(lambda s: self._sharding(s, meshes), exported._out_shardings), 0),
            (slots.PLATFORMS, "", self._strings(exported.platforms), 0),
            (slots.ORDERED_EFFECTS, "", self._tables(self._effect, exported.ordered_effects), 0),
            (slots.UNORDERED_EFFECTS, "", self._tables(self._effect, exported.unordered_effects), 0),
            (slots.DISABLED_CHECKS, "", self._tables(self._check, exported.disabled_safety_checks), 0),
            (slots.MLIR_MODULE_SERIALIZED, "", builder.CreateByteVector(exported.mlir_module_serialized), 0),
            (slots.CALLING_CONVENTION_VERSION, "PrependUint16Slot", exported.calling_convention_version, 0),
            (slots.MODULE_KEPT_VAR_IDX, "", self._scalars(exported.module_kept_var_idx, 2, "PrependUint16"), 0),
            (slots.USES_GLOBAL_CONSTANTS, "PrependBoolSlot", exported.uses_global_constants, False),
            (slots.NR_DEVICES, "PrependUint32Slot", exported.nr_devices, 0),
        ]
        if vjp_order > 0:
            fields.append((slots.VJP, "", self.exported(exported.vjp(), vjp_order - 1), 0))
        # A file of the time of XLA's own form stays one: its readers take the lists.
        if all(s is None or isinstance(s, NamedSharding) for s in both):
            fields += [
                (slots.UNIQUE_AVALS, "", self._tables(self._aval, avals), 0),
                (slots.UNIQUE_ABSTRACT_MESHES, "", self._tables(self._mesh, meshes), 0),
                (slots.UNIQUE_NAMED_SHARDINGS, "", self._tables(lambda s: self._named_sharding(s, meshes), named), 0),
                (slots.IN_AVALS_IDXS, "", self._scalars([avals[aval] for aval in in_avals], 4, "PrependUint32"), 0),
                (slots.OUT_AVALS_IDXS, "", self._scalars([avals[aval] for aval in out_avals], 4, "PrependUint32"), 0),
                (slots.IN_SHARDINGS_IDXS, "", sharding_indices(exported._in_shardings), 0),
                (slots.OUT_SHARDINGS_IDXS, "", sharding_indices(exported._out_shardings), 0),
            ]
        return self._table(schema.Exported, fields)

    def _tree(self, tree: Tree) -> int:
        slots, tree = schema.PyTreeDef, _without_keys(tree)
        fields: list[_Field] = [(slots.KIND, "PrependInt8Slot", KINDS.index(tree.kind), 0)]
        if tree.children:
            fields.append((slots.CHILDREN, "", self._tables(self._tree, tree.children), 0))
        if tree.kind == "dict":
            fields.append((slots.CHILDREN_NAMES, "", self._strings(tree.keys), 0))
        if tree.kind == "custom":
            fields.append((slots.CUSTOM_NAME, "", self._builder.CreateString(tree.name), 0))
            fields.append((slots.CUSTOM_AUXDATA, "", self._builder.CreateByteVector(tree.auxdata), 0))
        return self._table(schema.PyTreeDef, fields)

    def _aval(self, aval_and_space: tuple[Aval, int]) -> int:
        slots = schema.AbstractValue
        aval, space = aval_and_space
        if aval.dtype not in DTYPES:
            raise ValueError(f"the format of jax.export has no dtype {aval.dtype}; cast {aval} to another")
        return self._table(
            schema.AbstractValue,
            [
                (slots.SHAPE, "", self._strings([str(dim) for dim in aval.shape]), 0),
                (slots.DTYPE, "PrependInt8Slot", DTYPES.index(aval.dtype), 0),
                (slots.MEMORY_SPACE, "PrependInt8Slot", space, 0),
            ],
        )

    def _sharding(self, sharding: OneSharding, meshes: Sequence[Mesh]) -> int:
        slots = schema.Sharding
        if sharding is None:
            return self._table(schema.Sharding, [])
        if isinstance(sharding, NamedSharding):
            return self._table(schema.Sharding, [(slots.NAMED_SHARDING, "", self._named_sharding(sharding, meshes), 0)])
        serialized = self._builder.CreateByteVector(sharding.to_proto().SerializeToString())
        return self._table(
            schema.Sharding, [(slots.KIND, "PrependInt8Slot", 1, 0), (slots.HLO_SHARDING_PROTO, "", serialized, 0)]
        )

    def _named_sharding(self, sharding: NamedSharding, meshes: Sequence[Mesh]) -> int:
        slots = schema.NamedSharding
        fields: list[_Field] = [
            (slots.MESH, "", self._mesh(sharding.mesh), 0),
            (slots.SPEC, "", self._spec(sharding.spec), 0),
            (slots.ABSTRACT_MESH_IDX, "PrependUint32Slot", meshes.index(sharding.mesh), 0),
        ]
        if sharding.memory_kind is not None:
            fields.append((slots.MEMORY_KIND, "", self._builder.CreateString(sharding.memory_kind), 0))
        return self._table(slots, fields)

    def _spec(self, spec: PartitionSpec) -> int:
        axis, slots = schema.PartitionSpecOneAxis, schema.PartitionSpec
        partitions = self._tables(
            lambda axes: self._table(axis, [(axis.AXES, "", self._strings(axes), 0)]), spec.partitions
        )
        reduced, unreduced = self._strings(spec.reduced), self._strings(spec.unreduced)
        fields = [(slots.PARTITIONS, "", partitions, 0), (slots.REDUCED, "", reduced, 0)]
        return self._table(slots, [*fields, (slots.UNREDUCED, "", unreduced, 0)])

    def _mesh(self, mesh: Mesh) -> int:
        slots = schema.AbstractMesh
        types_ = [1 + AXIS_TYPES.index(kind) for kind in mesh.axis_types]
        fields: list[_Field] = [
            (slots.AXIS_SIZES, "", self._scalars(mesh.axis_sizes, 4, "PrependUint32"), 0),
            (slots.AXIS_NAMES, "", self._strings(mesh.axis_names), 0),
            (slots.AXIS_TYPES, "", self._scalars(types_, 1, "PrependByte"), 0),
        ]
        if mesh.abstract_device is not None:
            fields.append((slots.ABSTRACT_DEVICE, "", self._device(mesh.abstract_device), 0))
        return self._table(slots, fields)

    def _device(self, device: AbstractDevice) -> int:
        slots = schema.AbstractDevice
        kind: _Field = (slots.DEVICE_KIND, "", self._builder.CreateString(device.device_kind), 0)
        platform: _Field = (slots.PLATFORM, "", self._builder.CreateString(device.platform), 0)
        cores: list[_Field] = []
        if device.num_cores is not None:
            cores = [(slots.NUM_CORES, "PrependUint32Slot", device.num_cores, None)]
        return self._table(slots, [kind, *cores, platform])

    def _effect(self, name: str) -> int:
        slots = schema.Effect
        return self._table(schema.Effect, [(slots.TYPE_NAME, "", self._builder.CreateString(name), 0)])

    def _check(self, check: str) -> int:
        slots = schema.DisabledSafetyCheck
        kind, _, target = check.partition(":")
        fields: list[_Field] = [(slots.KIND, "PrependInt8Slot", CHECKS.index(kind), 0)]
        if target:
            fields.append((slots.CUSTOM_CALL_TARGET, "", self._builder.CreateString(target), 0))
        return self._table(schema.DisabledSafetyCheck, fields)

    def _table(self, table: type, fields: Iterable[_Field]) -> int:
        """Write a table of `export_schema` with these fields."""
        self._builder.StartObject(schema.slots(table))
        for slot, method, value, default in fields:
            getattr(self._builder, method or "PrependUOffsetTRelativeSlot")(slot, value, default)
        return int(self._builder.EndObject())

    def _tables(self, writer: Callable[[T], int], values: Iterable[T]) -> int:
        return self._offsets([writer(value) for value in values])

    def _strings(self, strings: Iterable[str]) -> int:
        return self._offsets([self._builder.CreateString(string) for string in strings])

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
