"""Types of the user's own in functions that are exported from Python, without a manifest.

Modules: `core/trees/keyed.py`, `core/trees/nodes.py`.
"""

import dataclasses
import enum
import functools
import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
import pytest

import stagec
from stagec.core.messages.errors import StagecError
from stagec.core.trees.keyed import Keyed
from stagec.core.trees.nodes import Fields
from stagec.core.trees.tree import Tree
from tests.frontends import workspace as small
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


class Locked(Opaque):
    """Its static part is a lock, which is the same in no two processes."""

    lock = threading.Lock()


jax.tree_util.register_pytree_node(Locked, lambda node: (node.children, {"lock": node.lock}), lambda _, c: Locked(*c))
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
    """The user may still register a type, and define a class of the same name again, as in a notebook."""
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


def test_types_without_keys_are_described_by_indices() -> None:
    exported = export(lambda x: (Opaque(x, x + 1), Strict(x)), VECTOR)
    assert [node.keyed for node in exported.out_tree.custom_nodes()] == [Keyed(None, {"aux": None})] * 2
    assert list(exported.out_tree.paths()) == ["[0][0]", "[0][1]", "[1][0]"]
    opaque, strict = stagec.Exported.deserialize(exported.serialize()).call(VECTOR)
    assert isinstance(opaque, Opaque)
    assert isinstance(strict, Strict)
    np.testing.assert_array_equal(opaque.children[1], VECTOR + 1)


def test_types_that_cannot_be_described() -> None:
    def function(x: Any) -> Any:
        lock = threading.Lock()
        tree = jax.tree_util.Partial(lambda: lock, x)
        return Locked(x), [Locked(x)], tree, {threading.Lock(): x}

    with pytest.raises(stagec.StagecError) as error:
        export(function, VECTOR)
    assert str(error.value) == (
        f"function: the result has a {__name__}.Locked (your class), which cannot be described: "
        "['lock'] is a _thread.lock, which means nothing in another process\n"
        "  register it below its class:\n"
        f"  jax.export.register_pytree_node_serialization(Locked, serialized_name='{__name__}:Locked',\n"
        "      serialize_auxdata=..., deserialize_auxdata=...)\n"
        "function: the result has a jax.tree_util.Partial (a class of jax), which cannot be described: "
        "lock is a _thread.lock, which means nothing in another process\n"
        "  register it in the module of your function:\n"
        "  from jax.tree_util import Partial\n"
        "  jax.export.register_pytree_node_serialization(Partial, serialized_name='jax.tree_util:Partial',\n"
        "      serialize_auxdata=..., deserialize_auxdata=...)\n"
        "function: the result has a dict with a key that cannot be described: "
        "it is a _thread.lock, which means nothing in another process\n"
        "  use numbers, strings, members of enums, dataclasses, or tuples of these as keys"
    )


def test_a_registered_function_that_raises() -> None:
    dial = Dial(7, VECTOR)
    with pytest.raises(stagec.StagecError) as error:
        export(lambda dial: dial.hands, dial)
    assert str(error.value).startswith(
        "<lambda>: the arguments have a tests.zoo.nodes.Dial (your class), which cannot be described: "
        "what it was registered with raised TypeError: descriptor 'encode'"
    )


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < other.value)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    row: int
    column: str


KEYS: dict[str, tuple[dict[Any, Any], list[str]]] = {
    "int": ({10: VECTOR, 2: VECTOR + 1}, ["[2]", "[10]"]),
    "negative and large": ({-1: VECTOR, 2**70: VECTOR + 1}, ["[-1]", "[1180591620717411303424]"]),
    "float": ({0.5: VECTOR, 0.25: VECTOR + 1}, ["[0.25]", "[0.5]"]),
    "bytes": ({b"b": VECTOR, b"a": VECTOR + 1}, ["[b'a']", "[b'b']"]),
    "None": ({None: VECTOR}, ["[None]"]),
    "tuple": ({(1, "a"): VECTOR, (0, "b"): VECTOR + 1}, ["[(0, 'b')]", "[(1, 'a')]"]),
    "enum": ({Color.RED: VECTOR, Color.BLUE: VECTOR + 1}, ["[Color.BLUE]", "[Color.RED]"]),
    "int enum": ({Level.HIGH: VECTOR, Level.LOW: VECTOR + 1}, ["[Level.LOW]", "[Level.HIGH]"]),
    "tuple of enum": ({(Level.LOW, Color.RED): VECTOR}, ["[(Level.LOW, Color.RED)]"]),
    "dataclass": (
        {Cell(0, "b"): VECTOR, Cell(0, "a"): VECTOR + 1},
        ["[Cell(column='a', row=0)]", "[Cell(column='b', row=0)]"],
    ),
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_dicts_keep_their_kind(kind: str) -> None:
    given, paths = KEYS[kind]
    exported = export(lambda tree: jax.tree.map(lambda x: x * 2, tree), given)
    assert list(exported.out_tree.paths()) == paths
    for artifact in (exported, stagec.Exported.deserialize(exported.serialize())):
        assert artifact.out_tree == exported.out_tree
        assert Tree.from_json(json.loads(json.dumps(artifact.out_tree.to_json()))) == exported.out_tree
        result = artifact.call(given)
        assert {type(key) for key in result} == {type(key) for key in given}
        for key, value in given.items():
            np.testing.assert_array_equal(result[key], value * 2)
    compiled = stagec.jit(lambda tree: tree).lower(given).compile()
    assert stagec.Compiled.deserialize(compiled.serialize())(given).keys() == given.keys()
    with pytest.raises(stagec.CallError) as refusal:
        exported.call({**given, "a": VECTOR})
    assert str(refusal.value).splitlines()[0] == "<lambda>: tree: unexpected key 'a'"
    with pytest.raises(stagec.CallError) as refusal:
        exported.call({})
    assert str(refusal.value).splitlines()[0] == "<lambda>: tree: " + ", ".join(
        f"key {path[1:-1]} is missing" for path in paths
    )


def test_a_key_that_cannot_be_described() -> None:
    with pytest.raises(stagec.StagecError) as error:
        export(lambda x: {frozenset({1}): x}, VECTOR)
    assert str(error.value) == (
        "<lambda>: the result has a dict with a key that cannot be described: it is {1}\n"
        "  use numbers, strings, members of enums, dataclasses, or tuples of these as keys"
    )


def test_keys_without_their_class() -> None:
    tree = export(lambda tree: tree, KEYS["enum"][0] | {}).out_tree
    elsewhere = Tree.from_json(json.loads(json.dumps(tree.to_json()).replace(f"{__name__}:Color", "elsewhere:Color")))
    assert elsewhere.unflatten([1, 2]) == {"BLUE": 1, "RED": 2}
    assert elsewhere.flatten({"RED": 2, "BLUE": 1}) == [1, 2]
    assert list(elsewhere.paths()) == list(tree.paths())


def nested(levels: int, leaf: Any) -> Any:
    return functools.reduce(lambda tree, _: [tree], range(levels), leaf)


@pytest.mark.parametrize("frontend", ["jax", "arrays"])
def test_trees_that_no_artifact_holds(frontend: str) -> None:
    """The arguments and the tuple of them are two levels more."""
    traced = stagec.jit(lambda x: x, frontend=frontend).trace(nested(98, VECTOR))
    assert stagec.Exported.deserialize(traced.export().serialize()).in_tree == traced.in_tree
    with pytest.raises((StagecError, ValueError), match="nested deeper than 100 levels"):
        stagec.jit(lambda x: x, frontend=frontend).trace(nested(99, VECTOR)).export().serialize()
    if frontend == "jax":  # a call writes nothing
        (result,) = jax.tree.leaves(stagec.jit(lambda x: x[0])(nested(150, VECTOR)))
        np.testing.assert_array_equal(result, VECTOR)


@pytest.mark.parametrize(("levels", "result"), [(500, 0), (0, 150)])
def test_a_manifest_with_trees_that_no_artifact_holds(tmp_path: Path, levels: int, result: int) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "model.py").write_text(
        "import functools, numpy\n"
        "def nested(n, x): return functools.reduce(lambda tree, _: [tree], range(n), x)\n"
        f"def avals(): return nested({levels}, numpy.ones(3, numpy.float32)),\n"
        f"def f(x): return nested({result}, x)\n"
    )
    status, said, _ = small.export(tmp_path, small.spec(entry="model:f", args=[], avals="model:avals"))
    where, what = ("functions.f.avals", "model:avals returned") if levels else ("functions.f", "the result has")
    assert (status, said) == (
        2,
        f"pkg/m.toml: {where}: {what} containers that are nested deeper than 100 levels\n"
        "  write one list or dict for several levels\n",
    )
