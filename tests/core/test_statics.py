"""Static parts of pytree nodes are described by what they are: the same in every process, and differences show."""

import contextlib
import dataclasses
import enum
import functools
import json
import math
import re
import subprocess
import sys
import threading
import types
from collections import OrderedDict
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings, strategies as st

from stagec.core.trees import statics
from tests.building import COMPILER, ROOT


class Mode(enum.Enum):
    TRAIN = "train"


class Size(NamedTuple):
    rows: int


@dataclasses.dataclass(frozen=True)
class Config:
    size: Size
    names: tuple[str, ...] = ()
    cache: Any = dataclasses.field(default=None, compare=False)


class Scaled:
    """Neither a dataclass nor comparable: what Python copies says what it is."""

    def __init__(self, by: float) -> None:
        self.by = by

    def apply(self, x: Any) -> Any:
        return x * self.by


def schedule(rate: float, warm: Any = None) -> Any:
    def at(step: Any, power: int = 2, *, floor: float = 0.0) -> Any:
        return rate * step**power + floor if warm is None else warm(step)

    return at


REBUILT: dict[str, Any] = {
    "plain": [None, True, 1, 0.5, "a", b"\0"],
    "numbers": (2**70, float("inf"), 1 + 2j),
    "containers": {(1, "a"): [{2: frozenset({1, 2})}], None: {"x", "y"}},
    "an enum": Mode.TRAIN,
    "an ordered dict": OrderedDict(b=1, a=(2,)),
    "an index": (..., slice(1), slice(None, -1, 2), range(1, 9, 2)),
    "constants of C": (NotImplemented, Ellipsis),
    "a PyTreeDef": jax.tree.structure(({"a": 1, "b": [None]}, Size(3))),
    "fields": (Size(2), dataclasses.replace(Config(Size(1)))),
    "what is imported": (Config, np.add, jax.nn.relu, jnp.float32, json, len)[:4],
    "dtypes": (np.dtype("float32"), np.dtype(ml_dtypes.bfloat16)),
}


@pytest.mark.parametrize("name", REBUILT)
def test_values_that_are_rebuilt(name: str) -> None:
    value = REBUILT[name]
    described = statics.describe(value)
    assert json.loads(statics.canonical(described)) == described
    if name != "fields":
        assert statics.rebuild(described) == value
    else:  # fields that dataclasses do not compare are left out
        assert statics.rebuild(described["tuple"][0]) == value[0]
        with pytest.raises(statics.Unknown):
            statics.rebuild(described)


def test_arrays_are_rebuilt_where_they_are_small() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    rebuilt = statics.rebuild(statics.describe((array, np.float32(2), np.bool_(True))))
    np.testing.assert_array_equal(rebuilt[0], array)
    assert [type(one) for one in rebuilt[1:]] == [np.float32, np.bool_]
    large = statics.describe(np.zeros(1000))
    assert "bytes" not in large
    assert large != statics.describe(np.ones(1000))


class Length(np.ndarray[Any, Any]):
    """NumPy's array with more to it, as those of astropy."""

    unit: str

    def __new__(cls, values: Any, unit: str) -> Self:
        made = np.asarray(values).view(cls)
        made.unit = unit
        return made

    def __reduce__(self) -> Any:
        return Length, (np.asarray(self), self.unit)


PAIRS: dict[str, tuple[Any, Any, str]] = {
    "a closure": (schedule(0.1), schedule(0.2), "rate is 0.2, it was 0.1"),
    "a closure in a closure": (
        schedule(1.0, schedule(0.1)),
        schedule(1.0, schedule(0.2)),
        "warm.rate is 0.2, it was 0.1",
    ),
    "optax": (optax.adam(1e-3), optax.adam(2e-3), "update.update_fns[1].tx.update.step_size is -0.002, it was -0.001"),
    "a method": (Scaled(1.0).apply, Scaled(2.0).apply, "by is 2.0, it was 1.0"),
    "another method": (Scaled(1.0).apply, Scaled(1.0).__init__, "it is a Scaled.__init__, it was a Scaled.apply"),
    "a partial": (functools.partial(len, 1), functools.partial(len, 2), "[0] is 2, it was 1"),
    "a dict": ({"a": 1}, {"a": 2}, "['a'] is 2, it was 1"),
    "a longer tuple": ((1,), (1, 2), "it is (1, 2), it was (1,)"),
    "a field": (Config(Size(1)), Config(Size(2)), "size.rows is 2, it was 1"),
    "an array": (
        np.zeros(2),
        np.zeros(3),
        "it is an array of <f8 and shape (3,), it was an array of <f8 and shape (2,)",
    ),
    "a mask": (
        np.ma.array([1, 2], mask=[0, 1]),
        np.ma.array([1, 2], mask=[0, 0]),
        r"[5] is b'\x00\x00', it was b'\x00\x01'",
    ),
    "a class with a unit": (Length([1], "m"), Length([1], "ft"), "[1] is 'ft', it was 'm'"),
    "an index": ((..., slice(1)), (..., slice(2)), "[1][1] is 2, it was 1"),
    "a jitted function": (jax.jit(schedule(1.0)), jax.jit(schedule(2.0)), "rate is 2.0, it was 1.0"),
    "an ordered dict": (OrderedDict(a=1), OrderedDict(a=2), "['a'] is 2, it was 1"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_that_differ(name: str) -> None:
    was, now, text = PAIRS[name]
    first, second = statics.describe(was), statics.describe(now)
    assert statics.difference(first, second) == text


def test_values_that_are_described_alike() -> None:
    def recursive(step: Any) -> Any:
        return recursive(step)

    for make in (
        lambda: schedule(0.1),
        lambda: optax.adamw(schedule(0.1)),
        lambda: Scaled(1.0),
        object,
        lambda: recursive,
    ):
        assert statics.describe(make()) == statics.describe(make())
    assert statics.describe(Config(Size(1), cache=1)) == statics.describe(Config(Size(1), cache=2))


UNSTABLE: dict[str, tuple[Any, str]] = {
    "a lock": (threading.Lock(), "it is a _thread.lock, which means nothing in another process"),
    "in containers": ({"a": [(i for i in ())]}, "['a'][0] is a generator, which means nothing in another process"),
    "a closure": (schedule(1.0, (i for i in ())), "warm is a generator, which means nothing in another process"),
    "objects": (np.array([object()]), "it is an array of Python objects"),
    "a deep one": (
        functools.reduce(lambda inner, _: [inner], range(100), []),
        f"{'[0]' * 61} is too large to be described",
    ),
    "a large one": ([None] * 100_001, "[99999] is too large to be described"),
}


@pytest.mark.parametrize("name", UNSTABLE)
def test_values_without_a_stable_description(name: str) -> None:
    value, text = UNSTABLE[name]
    with pytest.raises(ValueError, match=r"^" + re.escape(text)):
        statics.describe(value)


STABLE = """
import sys
sys.path[:0] = {path!r}
from stagec.core.trees import statics
from tests.core import test_statics as these
import jax, numpy as np
values = [first for first, *_ in these.PAIRS.values()]
print(statics.canonical([statics.describe(value) for value in [*values, *these.REBUILT.values(), object()]]))
"""


def test_a_description_is_the_same_in_every_process() -> None:
    path = [str(COMPILER), str(ROOT), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    found = {
        subprocess.run(
            [sys.executable, "-B", "-c", STABLE.format(path=path)],
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, folder in (("0", "/"), ("4711", "/tmp"))
    }
    assert len(found) == 1
    assert " at 0x" not in found.pop()


VALID = [
    statics.describe(value) for value in (1j, b"a", (1, 2), {1: 2}, math.nan, np.float32(1), np.ones(2), np.dtype("f4"))
]
BROKEN = [{"complex": []}, {"dtype": "9" * 1000}, {"dict": [["a", 1], True]}, {"set": [[1]]}, {"treedef": ["*"]}]


def described() -> st.SearchStrategy[Any]:
    """Draw JSON with the keys of descriptions: most of it describes nothing."""
    names = sorted({name for part in (*VALID, *BROKEN) for name in part})
    leaf = (
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(VALID + BROKEN)
    )
    return st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(names), inner, max_size=3)
    )


@settings(max_examples=400, deadline=None)
@given(described(), described())
@example({"complex": []}, {"complex": [1.0]})
@example({"dtype": "9" * 1000}, {"dtype": "<f4"})
@example({"dict": [["a", 1], True]}, {"dict": [["a", 1]]})
def test_what_describes_nothing_is_refused(first: Any, second: Any) -> None:
    with contextlib.suppress(statics.Unknown, ValueError, TypeError):
        statics.rebuild(first)
    assert isinstance(statics.text(first), str)
    assert isinstance(statics.difference(first, second), str)


def test_broken_descriptions_are_never_rebuilt() -> None:
    for broken in BROKEN:
        with pytest.raises((ValueError, TypeError)):
            statics.rebuild(broken)


def test_nothing_is_imported_and_called_to_rebuild() -> None:
    for described in ({"name": "nowhere:x"}, {"enum": "nowhere:Color", "name": "RED"}, {"made": None, "args": []}):
        with pytest.raises(statics.Unknown):
            statics.rebuild(described)
    assert statics.rebuild({"name": "types:SimpleNamespace"}) is types.SimpleNamespace
    with pytest.raises(statics.Unknown):
        statics.rebuild({"object": "subprocess:Popen", "fields": {"args": "true"}})
