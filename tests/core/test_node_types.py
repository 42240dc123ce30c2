"""Types that the model registered with JAX by functions: plain containers without its code, its own types with it.

Modules: `core/trees/one_level.py`.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import pytest

import stagec
from tests.building import COMPILER, ROOT
from tests.zoo import nodes

VECTOR = np.arange(3, dtype=np.float32)
PLAIN = {"dial": (VECTOR, VECTOR + 1), "table": {"a": VECTOR, "b": VECTOR}, "unit": {}}


def gauge(mode: str = "±", names: str = "ab", unit: str = "m") -> Any:
    return nodes.Gauge(
        nodes.Dial(mode, VECTOR, VECTOR + 1), nodes.Table(dict.fromkeys(names, VECTOR)), nodes.Unit(unit)
    )


def check_plain(result: Any) -> None:
    assert {name: type(value) for name, value in result.items()} == {"dial": tuple, "table": dict, "unit": dict}
    for hand, expected in zip(result["dial"], (VECTOR * 2, VECTOR * 2 + 2), strict=True):
        np.testing.assert_array_equal(hand, expected)
    assert list(result["table"]) == ["a turned", "b turned"]
    np.testing.assert_array_equal(result["table"]["b turned"], VECTOR + 2)


def check_typed(result: Any) -> None:
    assert isinstance(result, nodes.Gauge)
    assert isinstance(result.dial, nodes.Dial)
    assert isinstance(result.table, nodes.Table)
    assert (result.dial.mode, result.unit) == ("±", nodes.Unit("m"))
    check_plain({"dial": result.dial.hands, "table": result.table.columns, "unit": {}})


@pytest.mark.parametrize("argument", [gauge(), PLAIN], ids=["objects", "plain"])
def test_types_that_are_registered(zoo: Path, argument: Any) -> None:
    check_typed(stagec.load(zoo)["turned"](argument, 2))


@pytest.mark.parametrize("argument", [gauge(), PLAIN], ids=["objects", "plain"])
def test_no_types(zoo: Path, argument: Any) -> None:
    check_plain(stagec.load(zoo, types=[])["turned"](argument, 2))


def test_some_types(zoo: Path) -> None:
    result = stagec.load(zoo, types=[nodes.Dial])["turned"](gauge(), 2)
    assert isinstance(result["dial"], nodes.Dial)
    assert type(result["table"]) is dict


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (
            gauge(mode="+"),
            "gauge.dial: its static data is b'+', it was b'\\xc2\\xb1' when the function was built",
        ),
        (
            gauge(names="ac"),
            'gauge.table: its static data is b\'["a", "c"]\', it was b\'["a", "b"]\' when the function was built',
        ),
        (gauge(unit="cm"), "gauge.unit: name is 'cm', it was 'm' when the function was built"),
        (
            {**PLAIN, "dial": VECTOR},
            "gauge.dial: expected a zoo.Dial, or a tuple of its children, not a value of type ndarray",
        ),
        ({**PLAIN, "dial": (VECTOR,)}, "gauge.dial: expected 2 elements, not 1"),
    ],
    ids=["static data", "names", "a static node", "an array", "a child too few"],
)
def test_objects_that_do_not_fit(zoo: Path, argument: Any, text: str) -> None:
    with pytest.raises(stagec.CallError) as refusal:
        stagec.load(zoo)["turned"](argument, 2)
    said, _, shown = str(refusal.value).partition("\n")
    assert (refusal.value.code, said) == ("structure", f"turned: {text}")
    assert shown.startswith(
        "  the call is turned(gauge, by, /) -> result\n    gauge             tests.zoo.nodes:Gauge\n"
    )


def test_objects_on_the_device(zoo: Path) -> None:
    state = stagec.device_put(gauge())
    assert isinstance(state.dial.hands[0], stagec.pjrt.arrays.DeviceArray)
    check_typed(stagec.load(zoo)["turned"](state, 2))
    with pytest.raises(stagec.CallError, match=r"a object, which is not an array: .* or a dict of its fields"):
        stagec.device_put({"x": object()})


def test_artifacts_of_jax_take_and_give_them() -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    hand = jax.ShapeDtypeStruct((batch,), np.float32)

    def swap(dial: Any) -> Any:
        return nodes.Dial(dial.mode, *dial.hands[::-1])

    theirs = jax.export.export(jax.jit(swap))(nodes.Dial("m", hand, hand))
    result = stagec.Exported.deserialize(theirs.serialize()).call(nodes.Dial("m", VECTOR, VECTOR + 1))
    assert isinstance(result, nodes.Dial)
    assert result.mode == "m"
    np.testing.assert_array_equal(result.hands[0], VECTOR + 1)


def in_a_process(script: str, zoo: Path) -> str:
    """Run a script that has `bundle`, `argument` (plain), numpy and stagec; return what it prints."""
    path = [str(COMPILER), str(ROOT), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    start = f"import sys\nsys.path[:0] = {path!r}\n"
    prepared = (
        "import numpy as np, stagec\nx = np.arange(3, dtype=np.float32)\n"
        "argument = {'dial': (x, x), 'table': {'a': x, 'b': x}, 'unit': {}}\n"
        f"bundle = {str(zoo)!r}\n"
    )
    head, _, body = script.rpartition("---\n")
    command = [sys.executable, "-B", "-c", start + head + prepared + body]
    done = subprocess.run(command, capture_output=True, text=True, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_JAX = """
sys.modules["jax"] = None
---
class Dial:
    pass

def flatten(dial):
    return dial.hands, dial.mode

def unflatten(mode, hands):
    dial = Dial()
    dial.mode, dial.hands = mode, hands
    return dial

types = {"zoo.Dial": stagec.PyTreeNode(Dial, flatten, unflatten)}
print(stagec.load(bundle)["turned"](argument, 2)["dial"][0])
function = stagec.load(bundle, types=types)["turned"]
dial = function(argument, 2)["dial"]
print(type(dial), dial.mode, dial.hands[0])
print(function({**argument, "dial": dial}, 2)["dial"].hands[0])
"""


def test_functions_that_are_given_need_no_jax(zoo: Path) -> None:
    assert in_a_process(WITHOUT_JAX, zoo).splitlines() == [
        "[0. 2. 4.]",
        "<class '__main__.Dial'> b'\\xc2\\xb1' [0. 2. 4.]",
        "[0. 4. 8.]",
    ]


IMPORTED_LATER = """
---
turned = stagec.load(bundle)["turned"]
print(type(turned(argument, 2)).__name__)
import tests.zoo.nodes
print(type(turned(argument, 2)).__name__, type(turned(argument, 2).dial).__name__)
"""


def test_what_is_imported_after_loading_counts(zoo: Path) -> None:
    assert in_a_process(IMPORTED_LATER, zoo) == "dict\nGauge Dial\n"


ANOTHER_VERSION = """
import jax, jax.export
class Dial:
    pass
jax.tree_util.register_pytree_node(Dial, lambda dial: ((dial.hand,), None), lambda _, children: Dial())
def from_children(mode, hands):
    dial = Dial()
    dial.hand = hands[0]
    return dial
jax.export.register_pytree_node_serialization(
    Dial, serialized_name="zoo.Dial", serialize_auxdata=str.encode, deserialize_auxdata=bytes.decode,
    from_children=from_children)
---
try:
    stagec.load(bundle)["turned"](argument, 2)
except stagec.CallError as error:
    print(error.code, error, sep=": ")
print(len(stagec.load(bundle, types=[])["turned"](argument, 2)["dial"]))
"""


def test_a_type_that_has_other_children_now(zoo: Path) -> None:
    assert in_a_process(ANOTHER_VERSION, zoo).splitlines() == [
        "structure: turned: the result: Dial has 1 child here, it had 2 when the function was built",
        "2",
    ]
