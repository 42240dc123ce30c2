"""The schema of a serialized `jax.export.Exported`: its tables and enumerations.

Names and order are those of jax/_src/export/serialization.fbs, which only ever grows at the end of a table;
tests/stages/test_serialization.py holds them against the accessors that JAX generated of it.
"""

from collections.abc import Mapping

from stagec.core.trees.tree import Kind

TABLES: Mapping[str, Mapping[str, str]] = {
    "PyTreeDef": {
        "kind": "int8",
        "children": "[PyTreeDef]",
        "children_names": "[string]",
        "custom_name": "string",
        "custom_auxdata": "bytes",
    },
    "AbstractDevice": {"device_kind": "string", "num_cores": "uint32?", "platform": "string"},
    "AbstractMesh": {
        "axis_sizes": "[uint32]",
        "axis_names": "[string]",
        "axis_types": "[int8]",
        "abstract_device": "AbstractDevice",
    },
    "PartitionSpecOneAxis": {"axes": "[string]"},
    "PartitionSpec": {"partitions": "[PartitionSpecOneAxis]", "reduced": "[string]", "unreduced": "[string]"},
    "NamedSharding": {
        "mesh": "AbstractMesh",
        "spec": "PartitionSpec",
        "memory_kind": "string",
        "abstract_mesh_idx": "uint32",
    },
    "AbstractValue": {"kind": "int8", "shape": "[string]", "dtype": "int8", "memory_space": "int8"},
    "Sharding": {"kind": "int8", "hlo_sharding_proto": "bytes", "named_sharding": "NamedSharding"},
    "Effect": {"type_name": "string"},
    "DisabledSafetyCheck": {"kind": "int8", "custom_call_target": "string"},
    "Exported": {
        "serialization_version": "uint16",
        "function_name": "string",
        "in_tree": "PyTreeDef",
        "in_avals": "[AbstractValue]",
        "out_tree": "PyTreeDef",
        "out_avals": "[AbstractValue]",
        "nr_devices_short": "int16",
        "in_shardings": "[Sharding]",
        "out_shardings": "[Sharding]",
        "platforms": "[string]",
        "ordered_effects": "[Effect]",
        "unordered_effects": "[Effect]",
        "disabled_checks": "[DisabledSafetyCheck]",
        "mlir_module_serialized": "bytes",
        "calling_convention_version": "uint16",
        "module_kept_var_idx": "[uint16]",
        "uses_global_constants": "bool",
        "vjp": "Exported",
        "nr_devices": "uint32",
        "unique_avals": "[AbstractValue]",
        "unique_abstract_meshes": "[AbstractMesh]",
        "unique_named_shardings": "[NamedSharding]",
        "in_avals_idxs": "[uint32]",
        "out_avals_idxs": "[uint32]",
        "in_shardings_idxs": "[uint32]",
        "out_shardings_idxs": "[uint32]",
        "jax_version": "string",
    },
}
"""The fields of each table with their types, in the order of their slots.

A type is a scalar, with a question mark where it may be left out; "string", "bytes" or the name of a table; or one of
these in brackets, for a vector.
"""

# Enumerations: our names, by value.

# fmt: off
DTYPES = (
    "bool", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f16", "f32", "f64", "c64", "c128", "bf16",
    "i4", "u4", "f8_e4m3b11fnuz", "f8_e4m3fn", "f8_e4m3fnuz", "f8_e5m2", "f8_e5m2fnuz", "f0",
    "f8_e4m3", "f8_e3m4", "f8_e8m0fnu", "f4_e2m1fn", "key<fry>", "key<rbg>", "key<urbg>",
)
"""DType."""
# fmt: on
CHECKS = ("platform", "custom_call", "shape_assertions")
"""DisabledSafetyCheckKind."""
KINDS: tuple[Kind, ...] = ("leaf", "none", "tuple", "list", "dict", "custom")
"""PyTreeDefKind."""
DEVICE_MEMORY = 1
"""MemorySpace; 0 is not written."""
