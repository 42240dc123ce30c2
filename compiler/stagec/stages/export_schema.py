"""The schema of a serialized `jax.export.Exported`: a class for each table, with its fields by their slots.

Names and order are those of jax/_src/export/serialization.fbs, which only ever grows at the end of a table;
tests/stages/test_serialization.py holds them against the accessors that JAX generated of it.
"""

import functools

# Tables. Each has as many slots as fields.


class PyTreeDef:
    """Slots of the table PyTreeDef."""

    KIND, CHILDREN, CHILDREN_NAMES, CUSTOM_NAME, CUSTOM_AUXDATA = range(5)


class AbstractDevice:
    """Slots of the table AbstractDevice."""

    DEVICE_KIND, NUM_CORES, PLATFORM = range(3)


class AbstractMesh:
    """Slots of the table AbstractMesh."""

    AXIS_SIZES, AXIS_NAMES, AXIS_TYPES, ABSTRACT_DEVICE = range(4)


class PartitionSpecOneAxis:
    """Slots of the table PartitionSpecOneAxis."""

    (AXES,) = range(1)


class PartitionSpec:
    """Slots of the table PartitionSpec."""

    PARTITIONS, REDUCED, UNREDUCED = range(3)


class NamedSharding:
    """Slots of the table NamedSharding."""

    MESH, SPEC, MEMORY_KIND, ABSTRACT_MESH_IDX = range(4)


class AbstractValue:
    """Slots of the table AbstractValue."""

    KIND, SHAPE, DTYPE, MEMORY_SPACE = range(4)


class Sharding:
    """Slots of the table Sharding."""

    KIND, HLO_SHARDING_PROTO, NAMED_SHARDING = range(3)


class Effect:
    """Slots of the table Effect."""

    (TYPE_NAME,) = range(1)


class DisabledSafetyCheck:
    """Slots of the table DisabledSafetyCheck."""

    KIND, CUSTOM_CALL_TARGET = range(2)


class Exported:
    """Slots of the table Exported."""

    (
        SERIALIZATION_VERSION,
        FUNCTION_NAME,
        IN_TREE,
        IN_AVALS,
        OUT_TREE,
        OUT_AVALS,
        NR_DEVICES_SHORT,
        IN_SHARDINGS,
        OUT_SHARDINGS,
        PLATFORMS,
        ORDERED_EFFECTS,
        UNORDERED_EFFECTS,
        DISABLED_CHECKS,
        MLIR_MODULE_SERIALIZED,
        CALLING_CONVENTION_VERSION,
        MODULE_KEPT_VAR_IDX,
        USES_GLOBAL_CONSTANTS,
        VJP,
        NR_DEVICES,
        UNIQUE_AVALS,
        UNIQUE_ABSTRACT_MESHES,
        UNIQUE_NAMED_SHARDINGS,
        IN_AVALS_IDXS,
        OUT_AVALS_IDXS,
        IN_SHARDINGS_IDXS,
        OUT_SHARDINGS_IDXS,
    ) = range(26)


TABLES = (
    *(PyTreeDef, AbstractDevice, AbstractMesh, PartitionSpecOneAxis, PartitionSpec, NamedSharding, AbstractValue),
    *(Sharding, Effect, DisabledSafetyCheck, Exported),
)


@functools.cache
def slots(table: type) -> int:
    """Return how many slots a table has."""
    return sum(name.isupper() for name in vars(table))


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
KINDS = ("leaf", "none", "tuple", "list", "dict", "custom")
"""PyTreeDefKind."""
DEVICE_MEMORY = 1
"""MemorySpace; 0 is not written."""
