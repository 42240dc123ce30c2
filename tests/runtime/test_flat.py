"""Calls with flat arrays, and of containers that jaxlib takes apart."""

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagec
from stagec.runtime.arrays import Array

PARAMS = {"w": np.arange(64, dtype=np.float32).reshape(16, 4), "b": np.ones(4, np.float32)}
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)


@pytest.fixture
def bundle(zoo: Path) -> Iterator[stagec.Bundle]:
    with stagec.load(zoo, policy="executable_only") as loaded:
        yield loaded


def refusal_of(flat: Any, *leaves: Any) -> tuple[str, str]:
    with pytest.raises(stagec.CallError) as refusal:
        flat(*leaves)
    return refusal.value.code, str(refusal.value)


def test_flat_results_are_those_of_a_call(bundle: stagec.Bundle) -> None:
    flat = bundle["mlp"].flat(PARAMS, X)
    assert flat.paths == ("args[0]['b']", "args[0]['w']", "args[1]")
    for make in (np.asarray, stagec.device_put):
        (result,) = flat(make(PARAMS["b"]), make(PARAMS["w"]), make(X))
        assert type(result) is Array
        np.testing.assert_array_equal(np.asarray(result), bundle["mlp"](PARAMS, X))


def test_flat_calls_check_what_xla_does_not(bundle: stagec.Bundle) -> None:
    flat = bundle["mlp"].flat(PARAMS, X)
    b, w = PARAMS["b"], PARAMS["w"]
    assert refusal_of(flat, b, w) == ("structure", "mlp: 2 arrays are given, 3 are wanted")
    assert refusal_of(flat, b, w, X[:1]) == ("shape", "mlp: args[1] is f32[1,16], f32[4,16] is wanted")
    small = stagec.device_put(X[:1])
    assert refusal_of(flat, b, w, small) == ("shape", "mlp: args[1] is f32[1,16], f32[4,16] is wanted")
    code, text = refusal_of(flat, b, w, X.astype(np.float64))
    assert (code, text) == ("dtype", "mlp: args[1] has dtype float64, float32 is wanted (f32[4,16])")
    bundle.close()
    assert refusal_of(flat, b, w, X) == ("closed", "mlp: the bundle was closed")


def test_flat_calls_donate(bundle: stagec.Bundle) -> None:
    state = stagec.device_put({"x": np.ones(4, np.float32), "y": [np.float32(2)]})
    flat = bundle["update"].flat(state, np.float32(1))
    flat(state["x"], state["y"][0], np.float32(1))
    assert state["x"].is_deleted()
    assert refusal_of(flat, state["x"], state["y"][0], np.float32(1))[0] == "deleted"
    state = stagec.device_put({"x": np.ones(4, np.float32), "y": [np.float32(2)]})
    bundle["update"].with_options(donate=False).flat(state, np.float32(1))(state["x"], state["y"][0], np.float32(1))
    assert not state["x"].is_deleted()


def test_flat_calls_on_several_devices(bundle: stagec.Bundle) -> None:
    params, x = {"w": np.ones((6, 4), np.float32), "b": np.ones(4, np.float32)}, np.ones((4, 6), np.float32)
    flat = bundle["sharded"].flat(params, x)
    total, y = flat(params["b"], params["w"], x)
    again = flat(params["b"], params["w"], x)
    wanted = bundle["sharded"](params, x)
    for result in (y, again[1]):
        np.testing.assert_array_equal(np.asarray(result), wanted["y"])
    np.testing.assert_array_equal(np.asarray(total), wanted["total"])


def test_flat_calls_are_not_filled_up(bundle: stagec.Bundle) -> None:
    wanted = "pooled: a flat call is not filled up: give all arrays, of a bucket's sizes"
    for size in (1, 2):  # of 2 the mask is left out
        assert refusal_of(bundle["pooled"].flat, np.ones((size, 3), np.float32)) == ("shape", wanted)
    flat = bundle["pooled"].flat(np.ones((2, 3), np.float32), valid=np.array([True, False]))
    assert len(flat(np.ones((2, 3), np.float32), np.array([True, True]))) == 2


def test_containers_in_any_order(bundle: stagec.Bundle) -> None:
    wanted = bundle["mlp"](PARAMS, X)
    for params in (dict(reversed(PARAMS.items())), OrderedDict(reversed(PARAMS.items()))):
        for _ in range(2):
            np.testing.assert_array_equal(bundle["mlp"](params, X), wanted)


def test_containers_that_do_not_fit_after_one_that_does(bundle: stagec.Bundle) -> None:
    bundle["mlp"](PARAMS, X)
    for params, what in (
        ({"w": PARAMS["w"]}, "mlp: args[0]: key 'b' is missing"),
        ({**PARAMS, 3: X}, "mlp: args[0]: key 3 is not wanted"),
        ({**PARAMS, "b": None}, "mlp: args[0]['b']: an array is wanted here, not None"),
        ({**PARAMS, "b": [X]}, "mlp: args[0]['b']: an array is wanted here, not a list of 1"),
    ):
        for _ in range(2):
            assert refusal_of(bundle["mlp"], params, X) == ("structure", what)
