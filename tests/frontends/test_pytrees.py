"""Types of the user's own in functions that are exported from Python, without a manifest."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
import pytest

import stagec
from stagec.core.nodes import Fields
from tests.zoo.nodes import Dial, Gauge, Table, Unit

VECTOR = np.arange(3, dtype=np.float32)


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Line:
    start: Point
    end: Point
    width: float = dataclasses.field(default=1.0, metadata={"static": True})


class Opaque:
    def __init__(self, *children: Any) -> None:
        self.children = children


class Strict(Opaque):
    def __init__(self, child: Any) -> None:
        super().__init__(child + 0)


for kind in (Opaque, Strict):
    jax.tree_util.register_pytree_node(
        kind, lambda node: (node.children, None), functools.partial(lambda kind, _, children: kind(*children), kind)
    )


def export(function: Any, *args: Any) -> stagec.Exported:
    exported: stagec.Exported = stagec.jit(function).trace(*args).export()
    return exported


def test_types_that_say_all_are_described() -> None:
    line = Line(Point(VECTOR, VECTOR + 1), Point(VECTOR, VECTOR), width=0.5)
    exported = export(lambda line: Line(line.end, line.start, line.width), line)
    nodes = {node.name: node.fields for node in exported.in_tree.custom_nodes()}
    assert nodes == {
        f"{__name__}:Line": Fields(("start", "end"), {"width": 0.5}),
        f"{__name__}:Point": Fields(("x", "y")),
    }
    read = stagec.Exported.deserialize(exported.serialize())
    assert (read.in_tree, read.out_tree) == (exported.in_tree, exported.out_tree)
    result = read.call(line)
    assert isinstance(result, Line)
    np.testing.assert_array_equal(result.end.y, VECTOR + 1)
    assert export(lambda line: line.end.x, line).vjp().call(line.start.x, line.start.y, *line.end, VECTOR)


def test_exporting_registers_nothing_with_jax() -> None:
    """The user may still register a type, and write a class of the same name anew, as in a notebook."""
    for _ in range(2):

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Local:
            x: Any

        assert export(lambda node: node.x, Local(VECTOR)).in_tree.num_leaves == 1
    jax.export.register_pytree_node_serialization(
        Local, serialized_name="local", serialize_auxdata=lambda _: b"", deserialize_auxdata=lambda _: ()
    )


def test_types_that_are_registered_keep_what_they_were_registered_with() -> None:
    dial = Dial("m", VECTOR)
    exported = export(lambda dial: Dial(dial.mode, *dial.hands, *dial.hands), dial)
    assert [(node.name, node.auxdata) for node in exported.out_tree.custom_nodes()] == [("zoo.Dial", b"m")]
    theirs = jax.export.deserialize(bytearray(exported.serialize()))
    assert theirs.in_tree == jax.tree.structure(((dial,), {}))
    for result in (exported.call(dial), theirs.call(dial)):
        assert isinstance(result, Dial)
        assert len(result.hands) == 2


def test_a_lowered_function_takes_and_gives_them() -> None:
    gauge = Gauge(Dial("m", VECTOR), Table({"a": VECTOR}), Unit("s"))
    compiled = stagec.jit(lambda gauge: gauge).lower(gauge).compile()
    read = stagec.Compiled.deserialize(compiled.serialize())
    for result in (compiled(gauge), read(gauge)):
        assert isinstance(result.dial, Dial)
        assert isinstance(result.table, Table)
        assert result.unit == Unit("s")


def test_types_that_cannot_be_described() -> None:
    def function(x: Any) -> Any:
        return Opaque(x), Strict(x), [Opaque(x)], {2: x}

    with pytest.raises(stagec.StagecError) as error:
        export(function, VECTOR)
    assert str(error.value) == "\n".join(
        f"function: the result has a {__name__}.{name}, which cannot be described: {why}\n"
        "  register it below its class:\n"
        f"  jax.export.register_pytree_node_serialization({name}, serialized_name='{__name__}:{name}',\n"
        "      serialize_auxdata=..., deserialize_auxdata=...)"
        for name, why in (
            ("Opaque", "its children have no names"),
            (
                "Strict",
                "to make one of placeholders raised TypeError: unsupported operand type(s) for +: 'object' and 'int'",
            ),
        )
    ) + (
        "\nfunction: the result has a dict with the key 2, and keys are stored as strings\n"
        "  write '2', or a list instead of the dict"
    )


def test_a_registered_function_that_raises() -> None:
    dial = Dial(7, VECTOR)
    with pytest.raises(stagec.StagecError) as error:
        export(lambda dial: dial.hands, dial)
    assert str(error.value).startswith(
        "<lambda>: the arguments have a tests.zoo.nodes.Dial, which cannot be described: what it was registered with "
        "raised TypeError: descriptor 'encode'"
    )


def test_keys_that_are_no_strings_keep_their_order() -> None:
    compiled = stagec.jit(lambda x: {2: x, 10: x + 1}).lower(VECTOR).compile()
    read = stagec.Compiled.deserialize(compiled.serialize())
    for result in (compiled(VECTOR), read(VECTOR)):
        np.testing.assert_array_equal(result["2"], VECTOR)
        np.testing.assert_array_equal(result["10"], VECTOR + 1)
