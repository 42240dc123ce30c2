"""Calls with flat arrays, and of containers that jaxlib takes apart.

Modules: `pjrt/calling_convention.py`, `pjrt/prepared.py`.
"""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import stagec
from stagec.pjrt.arrays import AbstractArray, DeviceArray, single_device
from stagec.pjrt.calling_convention import Signature
from stagec.pjrt.prepared import MOST_KINDS
from tests.zoo import inputs

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
        assert type(result) is DeviceArray
        np.testing.assert_array_equal(np.asarray(result), bundle["mlp"](PARAMS, X))


def test_flat_calls_check_what_xla_does_not(bundle: stagec.Bundle) -> None:
    flat = bundle["mlp"].flat(PARAMS, X)
    b, w = PARAMS["b"], PARAMS["w"]
    assert refusal_of(flat, b, w) == ("structure", "mlp: 2 arrays are given; expected 3")
    assert refusal_of(flat, b, w, X[:1]) == ("shape", "mlp: x is f32[1,16]; expected f32[4,16]")
    small = stagec.device_put(X[:1])
    assert refusal_of(flat, b, w, small) == ("shape", "mlp: x is f32[1,16]; expected f32[4,16]")
    code, text = refusal_of(flat, b, w, X.astype(np.float16))
    assert (code, text) == ("dtype", "mlp: x has dtype float16; expected float32 (f32[4,16])")
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


def test_flat_calls_are_not_padded(bundle: stagec.Bundle) -> None:
    wanted = "pooled: a flat call is not padded: give all arrays, of a bucket's sizes"
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
        ({"w": PARAMS["w"]}, "mlp: params: key 'b' is missing"),
        ({**PARAMS, 3: X}, "mlp: params: unexpected key 3"),
        ({**PARAMS, "b": None}, "mlp: params['b']: expected an array, not None"),
        ({**PARAMS, "b": [X]}, "mlp: params['b']: expected an array, not a list of 1"),
    ):
        for _ in range(2):
            code, text = refusal_of(bundle["mlp"], params, X)
            assert (code, text.partition("\n")[0]) == ("structure", what)


class Subclass(np.ndarray[Any, Any]):
    """numpy looks at its type, XLA does not."""


def same(results: Any, wanted: Any) -> bool:
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.parametrize("name", inputs.cases())
def test_calls_give_the_same_when_they_are_remembered(zoo: Path, name: str) -> None:
    function, args, kwargs = inputs.cases()[name]
    with stagec.load(zoo, policy="executable_only") as bundle:
        called = bundle[function]
        wanted = called(*args, **kwargs)
        results = {type(leaf) for leaf in jax.tree.leaves(wanted)}
        assert results <= {np.ndarray}  # and the second time as well
        flat = called.flat(*args, **kwargs)
        static = {key: value for key, value in kwargs.items() if key == "power"}
        kwargs = {key: value for key, value in kwargs.items() if key != "power"}
        leaves, tree = jax.tree.flatten((args, kwargs))
        for on_device in ([], range(0, len(leaves), 2), range(len(leaves))):
            for _ in range(3):
                given = [stagec.device_put(x) if i in on_device else np.asarray(x) for i, x in enumerate(leaves)]
                args, kwargs = jax.tree.unflatten(tree, given)
                again = called(*args, **kwargs, **static)
                assert same(again, wanted)
                assert {type(leaf) for leaf in jax.tree.leaves(again)} == ({DeviceArray} if on_device else results)
                fresh = [stagec.device_put(x) if i in on_device else np.asarray(x) for i, x in enumerate(leaves)]
                if called.weights or function == "turned":
                    continue  # their leaves are others
                assert same(flat(*fresh), wanted)


def test_what_is_remembered_is_no_reason_to_take_anything_else(bundle: stagec.Bundle) -> None:
    function, flat = bundle["mlp"], bundle["mlp"].flat(PARAMS, X)
    b, w = PARAMS["b"], PARAMS["w"]
    wanted = function(PARAMS, X)
    on_device = stagec.device_put([b, w, X])
    for leaves in ([b, w, X], on_device, [*on_device[:2], X]):
        for _ in range(2):
            assert same(flat(*leaves), wanted)
            assert same(function({"b": leaves[0], "w": leaves[1]}, leaves[2]), wanted)
    for x, code, what in (
        (X[:3], "shape", "f32[3,16]"),
        (X.T, "shape", "f32[16,4]"),
        (stagec.device_put(X[:3]), "shape", "f32[3,16]"),
        (X.astype(np.float16), "dtype", "float16"),
        (X.astype(">f4"), "dtype", ">f4"),
        (X.view(np.int32), "dtype", "int32"),
        (stagec.device_put(X.view(np.int32)), "dtype", "int32"),
        (np.float32(1), "shape", "f32[]"),
    ):
        for rest in ((b, w), on_device[:2]):
            for refused in (refusal_of(flat, *rest, x), refusal_of(function, dict(zip("bw", rest, strict=True)), x)):
                assert refused[0] == code
                assert what in refused[1]
    # What XLA reads as it is, or jaxlib turns into that.
    read_only, wide = X.copy(), np.repeat(X, 2, axis=1)
    read_only.flags.writeable = False
    for x in (read_only, wide[:, ::2], np.asfortranarray(X), X.view(Subclass), X[::-1][::-1]):
        for _ in range(2):
            assert same(flat(b, w, x), wanted)
            assert same(function(PARAMS, x), wanted)


def test_a_deleted_array_is_told_whenever_it_is_given(bundle: stagec.Bundle) -> None:
    def state() -> Any:
        return stagec.device_put({"x": np.ones(4, np.float32), "y": [np.float32(2)]})

    step = np.asarray(1, np.float32)
    kept = bundle["update"].with_options(donate=False)
    flat, kept_flat = (function.flat(state(), step) for function in (bundle["update"], kept))
    for _ in range(3):  # the last ones are remembered
        for call in (bundle["update"], lambda s, t: flat(s["x"], s["y"][0], t)):
            given = state()
            for function in (kept, lambda s, t: kept_flat(s["x"], s["y"][0], t)):
                function(given, step)
                assert not given["x"].is_deleted()
            call(given, step)
            assert given["x"].is_deleted()
            code, text = refusal_of(call, given, step)
            assert code == "deleted"
            assert text.startswith("update: state['x'] was donated to an earlier call")
    mine = {"x": np.ones(4, np.float32), "y": [np.asarray(2, np.float32)]}
    for _ in range(3):  # XLA overwrites what it is given: never the caller's memory
        bundle["update"](mine, step)
        flat(mine["x"], mine["y"][0], step)
        assert mine["x"].tolist() == [1, 1, 1, 1]


def test_a_closed_bundle_remembers_nothing(bundle: stagec.Bundle) -> None:
    for params in (PARAMS, stagec.device_put(PARAMS)):
        for _ in range(2):
            bundle["mlp"](params, X)
    bundle.close()
    for params in (PARAMS, stagec.device_put(PARAMS)):
        assert refusal_of(bundle["mlp"], params, X) == ("closed", "mlp: the bundle was closed")


def test_more_kinds_of_calls_than_are_remembered(bundle: stagec.Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    function = bundle["attention"]
    x = np.ones((2, 3, 8), np.float32)
    wanted = function(x)
    prepared: list[Any] = []
    prepare = Signature.prepare
    monkeypatch.setattr(Signature, "prepare", lambda *given: [prepared.append(given), prepare(*given)][1])
    # The kind of a device array is that of its sharding.
    aval = [AbstractArray(x.shape, x.dtype, single_device()) for _ in range(MOST_KINDS + 1)]
    for number, one in enumerate(aval):
        assert same(function(DeviceArray(stagec.device_put(x)._buffer, one)), wanted), number
    assert len(prepared) == MOST_KINDS - 1  # the numpy array's is known already


def test_bytes_in_another_order_are_turned_on_the_way_to_a_device() -> None:
    values = np.arange(3, dtype=">f4")
    assert np.asarray(stagec.device_put(values)).tolist() == [0, 1, 2]
    array = stagec.make_array_from_single_device_arrays((3,), single_device(), [values])
    assert (np.asarray(array).tolist(), array.dtype) == ([0, 1, 2], np.dtype(np.float32))


@pytest.mark.parametrize("first", ["one array", "several"])
def test_arrays_that_are_in_several_places(bundle: stagec.Bundle, first: str) -> None:
    """A call with one array in all places is remembered, and says nothing wrong about those with others."""
    function, args, _ = inputs.cases()["turned"]
    leaves, tree = jax.tree.flatten(args)
    with stagec.load(bundle._loaded.path, policy="executable_only") as fresh:
        interface = fresh[function]._of[""].interface
        for number in range(4):
            several = (number % 2 == 0) == (first == "several")
            values = [np.full_like(leaf, i + 1 if several else 1) for i, leaf in enumerate(leaves)]
            if not several:
                shared = {leaf.shape: leaf for leaf in values}
                values = [shared[leaf.shape] for leaf in values]
                assert len({*map(id, values)}) < len(values)
            given = jax.tree.unflatten(tree, values)
            wanted = jax.tree.map(np.asarray, bundle[function](*jax.tree.unflatten(tree, list(map(np.array, values)))))
            for _ in range(2):
                assert same(fresh[function](*given), wanted)
            assert [known.order is not None for known in interface._orders.values()] == [True]


def test_a_function_is_not_pickled(bundle: stagec.Bundle) -> None:
    function = bundle["loop"]
    with pytest.raises(TypeError) as error:
        pickle.dumps({"policy": function})
    assert str(error.value) == (
        "loop is a function of a bundle, and has executables of this process: do not pickle it, but call "
        "stagec.load(PATH) in the other process"
    )
    assert copy.deepcopy({"policy": function})["policy"] is copy.copy(function) is function
