"""The bytes of an `Exported`: the flatbuffers schema of `jax.export`, read and written without JAX.

Tables and enumerations are those of `export_schema`. `serialize` writes version 12 of JAX's schema, as JAX itself does:
with the lists of avals and shardings that older readers want (before April 2026).

The format is JAX's and not our own, so `jax.export` reads what a build writes, and stagec reads what JAX writes. None
of JAX's classes is used, because compilers and loaders read artifacts in processes without JAX.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import flatbuffers
from flatbuffers import number_types as types
from jaxlib import xla_client

from stagec.core.sizes.avals import Aval, parse_aval
from stagec.core.trees.keyed import Item, with_keys
from stagec.core.trees.tree import DEEPEST, LEAF, Tree
from stagec.pjrt import compatibility
from stagec.stages.data import ExportedData
from stagec.stages.errors import NotExported
from stagec.stages.export_schema import CHECKS, DEVICE_MEMORY, DTYPES, KINDS, TABLES
from stagec.stages.shardings import AXIS_TYPES, AbstractDevice, Mesh, NamedSharding, OneSharding, PartitionSpec

Stored = TypeVar("Stored", bound=ExportedData)
# What JAX 0.11.1 and newer write into the fields serialization_version and jax_version, and what older ones do: readers
# before December 2025 accept 2 and 3 alone. From 27 January 2027 on JAX may refuse files by these fields (a comment in
# jax/_src/export/serialization.py).
_VERSION, _VERSION_BEFORE = 12, 3
_DICT = "builtins:dict"
"""Name of the custom node that is a dict with keys that are not strings: JAX's format has none."""
_SCALARS: Mapping[str, Any] = {
    "bool": types.BoolFlags,
    "int8": types.Int8Flags,
    "int16": types.Int16Flags,
    "uint16": types.Uint16Flags,
    "uint32": types.Uint32Flags,
}
_NOTHING: Mapping[str, Any] = {**dict.fromkeys(_SCALARS, 0), "bool": False, "string": "", "bytes": b""}
"""The default of a field that is not stored, by type; None for the others."""

_Fields: TypeAlias = Mapping[str, Any]
"""The content of a table: its fields by name, in the stored order; None for a missing field.

A field that is a table has such a mapping too.
"""


def read(kind: type[Stored], serialized: bytes) -> Stored:
    """Read the bytes of `jax.export.Exported.serialize` as a `kind`. Raises NotExported for any other bytes."""
    try:
        start = flatbuffers.encode.Get(types.UOffsetTFlags.packer_type, serialized, 0)
        return _read_exported(kind, _Table("Exported", serialized, start, _Budget(len(serialized))))
    # flatbuffers checks nothing: the error for a wrong offset depends on its target.
    except (ValueError, IndexError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise NotExported(f"not a serialized jax.export.Exported ({error or type(error).__name__})") from error


def write(exported: ExportedData, vjp_order: int) -> bytes:
    """Return the bytes of `exported` with `vjp_order` orders of its vector-Jacobian products.

    Raises ValueError when it has fewer, or a dtype or nesting that the format does not have.
    """
    builder = flatbuffers.Builder(len(exported.mlir_module_serialized) + 4096)
    builder.Finish(_write(builder, "Exported", _exported(exported, vjp_order)))
    return bytes(builder.Output())


class _Type(NamedTuple):
    """The type of a field. scalar: flatbuffers' type; None for others. many: whether it is a vector of such values."""

    slot: int
    scalar: Any
    name: str
    many: bool


@functools.cache
def _type(table: str, field: str) -> _Type:
    slot, text = list(TABLES[table]).index(field), TABLES[table][field]
    name = text.strip("[]")
    return _Type(slot, _SCALARS.get(name.removesuffix("?")), name, name != text)


class _Budget:
    """How much may still be read of a buffer.

    Offsets may point to one position from many others, which makes a small file a large value. Writers' files need only
    one read of each byte, so this reads no more bytes than the file has.
    """

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ValueError("more is to be read than the file has")


class _Table:
    """One flatbuffers table, of a name in TABLES."""

    def __init__(self, name: str, buffer: bytes, position: int, budget: _Budget) -> None:
        budget.take(4)  # its own offset to its vtable
        if not 0 <= position <= len(buffer):
            raise ValueError("an offset points outside the file")
        self._name = name
        self._table = flatbuffers.table.Table(buffer, position)
        self._budget = budget

    def __contains__(self, field: str) -> bool:
        return bool(self._table.Offset(4 + 2 * _type(self._name, field).slot))

    def __getitem__(self, field: str) -> Any:
        """Return the value of a field, a _Table for a table. One that is not stored is 0, empty, or None."""
        slot, scalar, name, many = _type(self._name, field)
        offset = self._table.Offset(4 + 2 * slot)
        if not offset:
            return [] if many else _NOTHING.get(name)
        at = self._table.Pos + offset
        if not many:
            return self._value(at, scalar, name)
        width, (start, length) = scalar.bytewidth if scalar else 4, self._content(at)
        if start + width * length > len(self._table.Bytes):
            raise ValueError("a vector runs over the end")
        self._budget.take(width * length)
        return [self._value(at, scalar, name) for at in range(start, start + width * length, width)]

    def required(self, field: str) -> _Table:
        """Return a field that is a table. Raises ValueError if it is not stored."""
        table: _Table | None = self[field]
        if table is None:
            raise ValueError(f"field {_type(self._name, field).slot} is missing")
        return table

    def _value(self, at: int, scalar: Any, name: str) -> Any:
        """Return the value at a position, or at the target of the offset there."""
        if scalar:
            return self._table.Get(scalar, at)
        if name not in ("string", "bytes"):
            return _Table(name, self._table.Bytes, self._table.Indirect(at), self._budget)
        start, length = self._content(at)
        if start + length > len(self._table.Bytes):
            raise ValueError("a string runs over the end")
        self._budget.take(length)
        stored = bytes(self._table.Bytes[start : start + length])
        return stored if name == "bytes" else stored.decode("utf-8")

    def _content(self, at: int) -> tuple[int, int]:
        """Return the start of a vector's or string's content, and its length, which is stored before the content."""
        start = self._table.Indirect(at)
        return start + 4, self._table.Get(types.UOffsetTFlags, start)


def _write(builder: flatbuffers.Builder, table: str, fields: _Fields) -> int:
    """Write a table after its content, as flatbuffers requires; return its offset.

    One call for each table: trees may be nested deeply.
    """
    written = []
    for field, value in fields.items():
        if value is None:
            continue
        of, parts = _type(table, field), []
        for part in value if of.many else [value]:
            if of.scalar:
                parts.append(part)
            elif of.name == "string":
                parts.append(builder.CreateString(part))
            else:
                is_bytes = of.name == "bytes"
                parts.append(builder.CreateByteVector(part) if is_bytes else _write(builder, of.name, part))
        written.append((of, _vector(builder, of.scalar, parts) if of.many else parts[0]))
    builder.StartObject(len(TABLES[table]))
    for of, value in written:
        if of.scalar and not of.many:
            builder.PrependSlot(of.scalar, of.slot, value, _NOTHING.get(of.name))
        else:
            builder.PrependUOffsetTRelativeSlot(of.slot, value, 0)
    return int(builder.EndObject())


def _vector(builder: flatbuffers.Builder, scalar: Any, parts: Sequence[Any]) -> int:
    """Write a vector of scalars, or of offsets if `scalar` is None; return its offset."""
    width = scalar.bytewidth if scalar else 4
    builder.StartVector(width, len(parts), width)
    for part in reversed(parts):
        if scalar:
            builder.Prepend(scalar, part)
        else:
            builder.PrependUOffsetTRelative(part)
    return int(builder.EndVector())


def _read_exported(kind: type[Stored], table: _Table) -> Stored:
    # Since version 10 avals, meshes and shardings are stored once and named by index; older bytes list them.
    unique_avals = list(map(_read_aval, table["unique_avals"]))
    unique_meshes = list(map(_read_mesh, table["unique_abstract_meshes"]))
    unique_shardings = [_read_named_sharding(sharding, unique_meshes) for sharding in table["unique_named_shardings"]]

    def avals(side: str) -> list[tuple[Aval, int]]:
        return [unique_avals[i] for i in table[f"{side}_avals_idxs"]] or list(map(_read_aval, table[f"{side}_avals"]))

    def shardings(side: str, count: int) -> tuple[OneSharding, ...]:
        named = [unique_shardings[i - 1] if i else None for i in table[f"{side}_shardings_idxs"]]
        listed = named or [_read_sharding(sharding, unique_meshes) for sharding in table[f"{side}_shardings"]]
        return tuple(listed or [None] * count)

    in_tree, out_tree = _read_tree(table.required("in_tree")), _read_tree(table.required("out_tree"))
    in_avals, out_avals = avals("in"), avals("out")
    if in_tree.num_leaves != len(in_avals) or out_tree.num_leaves != len(out_avals):
        raise ValueError("trees and avals do not agree")
    memory_spaces = tuple(space for _, space in (*in_avals, *out_avals))
    exported = kind(
        fun_name=table["function_name"],
        in_tree=in_tree,
        in_avals=tuple(aval for aval, _ in in_avals),
        out_tree=out_tree,
        out_avals=tuple(aval for aval, _ in out_avals),
        nr_devices=table["nr_devices"] or table["nr_devices_short"],  # of 32 bits since serialization version 5
        platforms=tuple(table["platforms"]),
        ordered_effects=tuple(effect["type_name"] for effect in table["ordered_effects"]),
        unordered_effects=tuple(effect["type_name"] for effect in table["unordered_effects"]),
        disabled_safety_checks=tuple(map(_read_check, table["disabled_checks"])),
        mlir_module_serialized=table["mlir_module_serialized"],
        calling_convention_version=table["calling_convention_version"],
        module_kept_var_idx=tuple(table["module_kept_var_idx"]),
        uses_global_constants=table["uses_global_constants"],
        _in_shardings=shardings("in", len(in_avals)),
        _out_shardings=shardings("out", len(out_avals)),
        _memory_spaces=() if set(memory_spaces) <= {DEVICE_MEMORY} else memory_spaces,
        _vjp=_read_exported(kind, table["vjp"]) if "vjp" in table else None,
        _written_by=(table["serialization_version"], table["jax_version"]),
    )
    _check(exported)
    return exported


def _written_here() -> tuple[int, str]:
    """Return the versions that the JAX of the installed jaxlib would write."""
    return (_VERSION, compatibility.version()) if compatibility.numbers() >= (0, 11, 1) else (_VERSION_BEFORE, "")


def _check(exported: ExportedData) -> None:
    """Raise ValueError if fields do not belong together; offsets that were changed often give such values."""
    count, kept = len(exported.in_avals), exported.module_kept_var_idx
    if list(kept) != sorted({index for index in kept if index < count}):
        raise ValueError("the indices of kept arguments are not sorted, or there are fewer arguments")
    if len(exported._in_shardings) != count or len(exported._out_shardings) != len(exported.out_avals):
        raise ValueError("shardings and avals do not agree")
    if not exported.platforms or exported.nr_devices < 1:
        raise ValueError("it is for no platform, or for no device")
    if any(space < 0 for space in exported._memory_spaces):
        raise ValueError("unknown memory space")


def _exported(exported: ExportedData, vjp_order: int) -> _Fields:
    if vjp_order > 0 and not exported.has_vjp():
        raise ValueError(
            f"{exported.fun_name} has no vector-Jacobian product of an order that high; "
            f"export it with one, or write a smaller vjp_order"
        )
    count = len(exported.in_avals)
    spaces = exported._memory_spaces or (DEVICE_MEMORY,) * (count + len(exported.out_avals))
    both_avals = list(zip((*exported.in_avals, *exported.out_avals), spaces, strict=True))
    both = (*exported._in_shardings, *exported._out_shardings)
    named = list(dict.fromkeys(s for s in both if isinstance(s, NamedSharding)))
    meshes = list(dict.fromkeys(s.mesh for s in named))
    shardings = [_sharding(s, meshes) for s in both]
    avals = {pair: _aval(*pair) for pair in both_avals}
    version, jax_version = exported._written_by or _written_here()
    fields = {
        "serialization_version": version,
        "function_name": exported.fun_name,
        "in_tree": _tree(exported.in_tree),
        "in_avals": [avals[pair] for pair in both_avals[:count]],
        "out_tree": _tree(exported.out_tree),
        "out_avals": [avals[pair] for pair in both_avals[count:]],
        "in_shardings": shardings[:count],
        "out_shardings": shardings[count:],
        "platforms": exported.platforms,
        "ordered_effects": [{"type_name": name} for name in exported.ordered_effects],
        "unordered_effects": [{"type_name": name} for name in exported.unordered_effects],
        "disabled_checks": list(map(_disabled_check, exported.disabled_safety_checks)),
        "mlir_module_serialized": exported.mlir_module_serialized,
        "calling_convention_version": exported.calling_convention_version,
        "module_kept_var_idx": exported.module_kept_var_idx,
        "uses_global_constants": exported.uses_global_constants,
        "nr_devices": exported.nr_devices,
        "vjp": _exported(exported.vjp(), vjp_order - 1) if vjp_order > 0 else None,
    }
    last = {"jax_version": jax_version or None}
    # A file of the time of XLA's own form stays one: its readers take the lists.
    if not all(s is None or isinstance(s, NamedSharding) for s in both):
        return {**fields, **last}
    # JAX writes avals that differ in weak_type alone once.
    number = {pair: i for i, pair in enumerate(avals)}
    number_of = {sharding: i for i, sharding in enumerate((None, *named))}
    return {
        **fields,
        "unique_avals": list(avals.values()),
        "unique_abstract_meshes": list(map(_mesh, meshes)),
        "unique_named_shardings": [_named_sharding(s, meshes) for s in named],
        "in_avals_idxs": [number[pair] for pair in both_avals[:count]],
        "out_avals_idxs": [number[pair] for pair in both_avals[count:]],
        "in_shardings_idxs": [number_of[s] for s in exported._in_shardings],
        "out_shardings_idxs": [number_of[s] for s in exported._out_shardings],
        **last,
    }


def _read_tree(table: _Table, depth: int = 0) -> Tree:
    if depth > DEEPEST:
        raise ValueError(f"a tree is nested deeper than {DEEPEST} levels")
    number = table["kind"]
    if not 0 <= number < len(KINDS):
        raise ValueError(f"unknown kind of tree node {number}")
    if KINDS[number] == "leaf":
        return LEAF
    children = tuple(_read_tree(child, depth + 1) for child in table["children"])
    match KINDS[number]:
        case "none":
            return Tree("none")
        case "dict":
            return Tree("dict", children, tuple(table["children_names"]))
        case "custom":
            return _with_keys(Tree("custom", children, (), table["custom_name"], table["custom_auxdata"]))
        case kind:
            return Tree(kind, children)


def _tree(tree: Tree, depth: int = 0) -> _Fields:
    if depth > DEEPEST:
        raise ValueError(f"a tree is nested deeper than {DEEPEST} levels, and no reader takes more")
    tree = _without_keys(tree)
    fields: dict[str, Any] = {"kind": KINDS.index(tree.kind)}
    if tree.children:
        fields["children"] = [_tree(child, depth + 1) for child in tree.children]
    if tree.kind == "dict":
        fields["children_names"] = tree.keys
    if tree.kind == "custom":
        fields |= {"custom_name": tree.name, "custom_auxdata": tree.auxdata}
    return fields


def _with_keys(node: Tree) -> Tree:
    """Return a dict with keys that are not strings as a custom node for JAX's format; other nodes stay unchanged."""
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
    # JAX writes a dimension as it prints it; parse_aval brings it to one spelling.
    aval = parse_aval(f"{_named(DTYPES, table['dtype'])}[{','.join(table['shape'])}]")
    return aval, table["memory_space"] or DEVICE_MEMORY


def _aval(aval: Aval, space: int) -> _Fields:
    if aval.dtype not in DTYPES:
        raise ValueError(f"the format of jax.export has no dtype {aval.dtype}; cast {aval} to another")
    return {"shape": list(map(str, aval.shape)), "dtype": DTYPES.index(aval.dtype), "memory_space": space}


def _named(names: Sequence[str], value: int) -> str:
    """Return the name of a value of an enumeration."""
    if not 0 <= value < len(names):
        raise ValueError(f"unknown value {value} of an enumeration")
    return names[value]


def _read_check(table: _Table) -> str:
    kind, target = _named(CHECKS, table["kind"]), table["custom_call_target"]
    return f"{kind}:{target}" if target else kind


def _disabled_check(check: str) -> _Fields:
    kind, _, target = check.partition(":")
    return {"kind": CHECKS.index(kind), "custom_call_target": target or None}


def _read_mesh(table: _Table) -> Mesh:
    device = table["abstract_device"]
    return Mesh(
        tuple(table["axis_sizes"]),
        tuple(table["axis_names"]),
        tuple(_named(AXIS_TYPES, kind - 1) for kind in table["axis_types"]),
        AbstractDevice(device["device_kind"], device["num_cores"], device["platform"]) if device else None,
    )


def _mesh(mesh: Mesh) -> _Fields:
    return {
        "axis_sizes": mesh.axis_sizes,
        "axis_names": mesh.axis_names,
        "axis_types": [1 + AXIS_TYPES.index(kind) for kind in mesh.axis_types],
        "abstract_device": vars(mesh.abstract_device) if mesh.abstract_device is not None else None,
    }


def _read_named_sharding(table: _Table, meshes: Sequence[Mesh]) -> NamedSharding:
    spec = table.required("spec")
    axes = (axes["axes"] for axes in spec["partitions"])
    return NamedSharding(
        meshes[table["abstract_mesh_idx"]] if meshes else _read_mesh(table.required("mesh")),
        PartitionSpec(*axes, unreduced=spec["unreduced"], reduced=spec["reduced"]),
        table["memory_kind"] or None,
    )


def _named_sharding(sharding: NamedSharding, meshes: Sequence[Mesh]) -> _Fields:
    spec = sharding.spec
    partitions = [{"axes": axes} for axes in spec.partitions]
    return {
        "mesh": _mesh(sharding.mesh),
        "spec": {"partitions": partitions, "reduced": spec.reduced, "unreduced": spec.unreduced},
        "abstract_mesh_idx": meshes.index(sharding.mesh),
        "memory_kind": sharding.memory_kind,
    }


def _read_sharding(table: _Table, meshes: Sequence[Mesh]) -> OneSharding:
    if named := table["named_sharding"]:
        return _read_named_sharding(named, meshes)
    # Versions before 6 (January 2026) stored XLA's own form; a replicated array's has no bytes.
    if "hlo_sharding_proto" not in table:
        return None
    proto = xla_client.OpSharding()
    proto.ParseFromString(table["hlo_sharding_proto"])
    try:
        return xla_client.HloSharding.from_proto(proto)
    except Exception as error:  # XLA's status, by version RuntimeError or JaxRuntimeError
        raise ValueError(f"not a sharding that XLA wrote: {error}") from error


def _sharding(sharding: OneSharding, meshes: Sequence[Mesh]) -> _Fields:
    if sharding is None:
        return {}
    if isinstance(sharding, NamedSharding):
        return {"named_sharding": _named_sharding(sharding, meshes)}
    return {"kind": 1, "hlo_sharding_proto": sharding.to_proto().SerializeToString()}
