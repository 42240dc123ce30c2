"""Types that are registered with JAX by functions, each in another way: of none do the fields say all."""

import dataclasses
import json
from typing import Any

import jax
import jax.export
import jax.numpy as jnp


class Dial:
    """Its static data is not JSON: the loader knows no fields."""

    def __init__(self, mode: Any, *hands: Any) -> None:
        self.mode = mode
        self.hands = hands


jax.tree_util.register_pytree_node(Dial, lambda dial: (dial.hands, dial.mode), lambda mode, hands: Dial(mode, *hands))
jax.export.register_pytree_node_serialization(
    Dial, serialized_name="zoo.Dial", serialize_auxdata=str.encode, deserialize_auxdata=bytes.decode
)


class Table:
    """Columns by name. Its static data is a list of names, which the loader takes for fields."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns


jax.tree_util.register_pytree_with_keys(
    Table,
    lambda table: (
        [(jax.tree_util.DictKey(name), table.columns[name]) for name in table.columns],
        tuple(table.columns),
    ),
    lambda names, columns: Table(dict(zip(names, columns, strict=True))),
)
jax.export.register_pytree_node_serialization(
    Table,
    serialized_name="zoo.Table",
    serialize_auxdata=lambda names: json.dumps(names).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Unit:
    """A node without children."""

    name: str


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Gauge:
    """Its fields say all: nothing is registered for serialization."""

    dial: Dial
    table: Table
    unit: Unit


def turned(gauge: Any, by: Any) -> Any:
    columns = {f"{name} turned": column + by for name, column in gauge.table.columns.items()}
    return Gauge(Dial(gauge.dial.mode, *(hand * by for hand in gauge.dial.hands)), Table(columns), gauge.unit)


def turned_avals() -> Any:
    vector = jax.ShapeDtypeStruct((3,), jnp.float32)
    return Gauge(Dial("±", vector, vector), Table({"a": vector, "b": vector}), Unit("m")), jnp.float32(0)
