"""The tensors of a function: names by paths, and arrays from what clients send."""

from typing import Any

import jax
import numpy as np
import orjson
import pytest
from hypothesis import given, strategies as st

import stagec
from stagec.core.messages.calls import Call
from stagec.core.sizes.avals import DTYPES, Aval, parse_aval
from stagec.core.trees.tree import Tree
from stagec_serve.model import Model
from stagec_serve.refusal import RequestError
from stagec_serve.tensors import DATATYPES, Tensor, interface_of

KEYS = st.text("abc.'[]0 ", max_size=3)
TREES = st.recursive(
    st.just("*") | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)
RESULT = Tree.from_json("*"), [Aval("f32", ())]


def as_json(tree: Any) -> Any:
    match tree:
        case tuple():
            return {"tuple": list(map(as_json, tree))}
        case list():
            return list(map(as_json, tree))
        case dict():
            return {"dict": {key: as_json(tree[key]) for key in sorted(tree)}}  # JAX's order
    return tree


def tensor(aval: str) -> Tensor:
    call = Call("f", Tree.from_json(as_json((("*",), {}))), [parse_aval(aval)], *RESULT, ["x"])
    (only,) = interface_of(call).inputs
    return only


def refusal(code: str, call: Any, *arguments: Any) -> str:
    with pytest.raises(RequestError) as error:
        call(*arguments)
    assert error.value.code == code
    return str(error.value)


@given(TREES, TREES)
def test_names_are_the_paths_that_jax_has(argument: Any, by_keyword: Any) -> None:
    """Each leaf has one name, and from arrays by name comes the same tree."""
    tree = Tree.from_json(as_json(((argument,), {"more": by_keyword})))
    avals = [Aval("f32", (number,)) for number in range(tree.num_leaves)]
    tensors = interface_of(Call("f", tree, avals, *RESULT, ["x"])).inputs
    expected = [
        name + jax.tree_util.keystr(path)
        for name, part in (("x", argument), ("more", by_keyword))
        for path, _ in jax.tree_util.tree_flatten_with_path(part)[0]
    ]
    assert [tensor.name for tensor in tensors] == expected
    assert len({*expected}) == len(expected)
    by_name = {tensor.name: number for number, tensor in enumerate(tensors)}
    (again,), keywords = tree.unflatten([by_name[tensor.name] for tensor in tensors])  # type: ignore[misc]
    numbered = jax.tree.unflatten(jax.tree.structure((argument, by_keyword)), range(len(tensors)))
    assert (again, keywords["more"]) == numbered


@given(TREES, TREES, st.data())
def test_names_of_the_manifest_take_the_place_of_paths(argument: Any, result: Any, data: st.DataObject) -> None:
    """One to one: arrays by name are the same leaves as arrays by path, in the arguments and in the result."""
    tree, out = Tree.from_json(as_json(((argument,), {}))), Tree.from_json(as_json(result))
    avals, out_avals = ([Aval("f32", (n,)) for n in range(t.num_leaves)] for t in (tree, out))
    plain = interface_of(Call("f", tree, avals, out, out_avals, ["x"]))
    chosen = [data.draw(st.sets(st.sampled_from([t.name for t in part]))) if part else set() for part in plain]
    names = [{path: f"{kind}/{n}" for n, path in enumerate(sorted(of))} for kind, of in zip("io", chosen, strict=True)]
    call = Call("f", tree, avals, out, out_avals, ["x"], serve=dict(zip(("inputs", "outputs"), names, strict=True)))
    for part, other, table in zip(interface_of(call), plain, names, strict=True):
        assert [t._replace(name="") for t in part] == [t._replace(name="") for t in other]
        assert [t.name for t in part] == [table.get(t.name, t.name) for t in other]
        assert len({t.name for t in part}) == len(part)


def test_names_of_the_manifest(models: dict[str, Model], bundle: stagec.Bundle) -> None:
    interface = models["structured"].interface
    assert [t.name for t in interface.inputs] == ["image", "ids", "batch['rest'][1]", "scale/0"]
    assert [t.name for t in interface.outputs] == ["scaled", "result[1]['ids']"]
    assert bundle["structured"].usage.path("args[0]['image']") == "batch['image']"  # for callers it is as ever


def test_a_position_and_a_keyword_of_one_name_are_two_tensors() -> None:
    tree = Tree.from_json(as_json((("*",), {"x": "*"})))
    tensors = interface_of(Call("f", tree, [Aval("f32", ())] * 2, *RESULT, ["x"])).inputs
    assert [tensor.name for tensor in tensors] == ["args[0]", "kwargs['x']"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_has_a_datatype_or_is_refused_by_name(dtype: str) -> None:
    stored = {"f0": "bool"}.get(dtype, "u32" if dtype.startswith("key<") else dtype)
    if stored in DATATYPES:
        assert tensor(f"{dtype}[3]").datatype == DATATYPES[stored]
    else:
        text = f"x is {dtype}[3], and the Open Inference Protocol has no such datatype"
        assert refusal("unsupported", tensor, f"{dtype}[3]") == text


def test_weights_and_masks_are_not_inputs(models: dict[str, Model], bundle: stagec.Bundle) -> None:
    assert [tensor.metadata() for tensor in models["predict"].interface.inputs] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 16]}
    ]
    assert bundle["predict"].usage.signature.startswith("predict([params], x, /)")
    assert [tensor.name for tensor in models["pooled"].interface.inputs] == ["x"]
    assert [tensor.metadata() for tensor in models["draw"].interface.inputs] == [
        {"name": "key", "datatype": "UINT32", "shape": [2]}
    ]


@pytest.mark.parametrize(
    ("shape", "datatype", "text"),
    [
        ([2, 3], "FP64", "x: datatype is 'FP64'; expected FP32"),
        ([2, 3], None, "x: datatype is None; expected FP32"),
        ("23", "FP32", "x: shape is '23'; expected a list of whole numbers"),
        ([2, 3.0], "FP32", "x: shape is [2, 3.0]; expected a list of whole numbers"),
        ([2, True], "FP32", "x: shape is [2, True]; expected a list of whole numbers"),
        ([2], "FP32", "x: shape is [2]; expected f32[batch,3]"),
        ([2, 3, 1], "FP32", "x: shape is [2, 3, 1]; expected f32[batch,3]"),
        ([2, 4], "FP32", "x: shape is [2, 4]; expected f32[batch,3]"),
        ([-2, 3], "FP32", "x: shape is [-2, 3]; expected f32[batch,3]"),
        ([2**31, 3], "FP32", "x: shape is [2147483648, 3]; expected f32[batch,3]"),
    ],
)
def test_shapes_and_datatypes_are_checked(shape: Any, datatype: Any, text: str) -> None:
    assert refusal("request", tensor("f32[batch,3]").checked_shape, shape, datatype) == text


@pytest.mark.parametrize(
    ("aval", "data", "text"),
    [
        ("i8[2]", [1, 128], "x: Python integer 128 out of bounds for int8"),
        ("u8[2]", [1, -1], "x: Python integer -1 out of bounds for uint8"),
        ("i8[2]", [1, 1.0], "x: data has float; expected values of INT8"),
        ("i8[2]", [1, True], "x: data has bool; expected values of INT8"),
        ("bool[2]", [1, True], "x: data has int; expected values of BOOL"),
        ("f32[2]", [1, "2"], "x: data has str; expected values of FP32"),
        ("f32[2]", [1, None], "x: data has NoneType; expected values of FP32"),
        ("f32[2]", [1, [2]], "x: data has list; expected values of FP32"),
        ("f32[2]", [1, 1e39], "x: data has a number that is too large for FP32"),
        ("f16[2]", [1, 65520], "x: data has a number that is too large for FP16"),
        ("bf16[2]", [1, 3.4e38], "x: data has a number that is too large for BF16"),
        ("f32[2]", [1], "x: data does not have the 2 values that shape [2] needs"),
        ("f32[2]", {}, "x: data is {}; expected a list"),
        ("f32[2,2]", [[1, 2], [3]], "x: data is not nested as shape [2, 2] says"),
        ("f32[2,2]", [[1], [2], [3], [4]], "x: data is not nested as shape [2, 2] says"),
        ("f32[2,2]", [[1, 2], 3], "x: data is not nested as shape [2, 2] says"),
    ],
)
def test_numbers_are_checked(aval: str, data: Any, text: str) -> None:
    shape = tuple(map(int, parse_aval(aval).shape))
    assert refusal("request", tensor(aval).from_numbers, data, shape) == text


def test_bytes_are_checked() -> None:
    numbers = tensor("f32[n,2]")
    assert refusal("request", numbers.from_bytes, memoryview(bytes(7)), (1, 2)) == ("x: 7 bytes; shape [1, 2] takes 8")
    assert refusal("request", tensor("bool[2]").from_bytes, memoryview(b"\x00\x02"), (2,)) == (
        "x: a BOOL is a byte of 0 or 1"
    )
    several = tensor("f32[a,b,c]")
    assert refusal("request", several.from_bytes, memoryview(b""), (2**31 - 1, 2**31 - 1, 0)) == (
        "x: shape [2147483647, 2147483647, 0] is too large"
    )


@pytest.mark.parametrize("dtype", DATATYPES)
def test_arrays_come_back(dtype: str) -> None:
    only = tensor(f"{dtype}[2,3]")
    values = np.random.default_rng(1).integers(0, 2, (2, 3)).astype(only.dtype)
    ways = [
        only.from_bytes(memoryview(b"x" + values.tobytes())[1:], (2, 3)),  # at an odd address
        only.from_numbers(values.tolist(), (2, 3)),
        only.from_numbers(values.ravel().tolist(), (2, 3)),
    ]
    for array in ways:
        assert (array.dtype, array.shape, array.flags.aligned) == (values.dtype, (2, 3), True)
        assert array.tobytes() == values.tobytes()


def test_numbers_at_the_ends_of_json() -> None:
    """UINT64 has numbers that INT64 has not; -0 is a number of floats, and 0 as an integer."""
    largest = orjson.loads(b"[18446744073709551615, 9223372036854775808]")
    wide = Tensor("x", 0, Aval("u64", (2,)), "UINT64", np.dtype(np.uint64))
    assert wide.from_numbers(largest, (2,)).tolist() == [2**64 - 1, 2**63]
    signed = Tensor("x", 0, Aval("i64", (2,)), "INT64", np.dtype(np.int64))
    with pytest.raises(RequestError, match="x: "):
        signed.from_numbers(largest, (2,))
    zeros = orjson.loads(b"[-0.0, 0]")
    floats = Tensor("x", 0, Aval("f32", (2,)), "FP32", np.dtype(np.float32)).from_numbers(zeros, (2,))
    assert np.signbit(floats).tolist() == [True, False]
    assert signed.from_numbers(zeros, (2,)).tolist() == [0, 0]
    for tensor in (wide, signed):
        with pytest.raises(RequestError, match=r"x: data has float; expected values of U?INT64"):
            tensor.from_numbers(orjson.loads(b"[18446744073709551616]"), (1,))
