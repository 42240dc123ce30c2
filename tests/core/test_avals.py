"""The short notation of avals, and the dimension expressions in it.

Modules: `core/sizes/frozen.py`, `core/sizes/names.py`.
"""

import copy
import operator
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import assume, given, strategies as st

from stagec.core.sizes import names
from stagec.core.sizes.avals import (
    DTYPES,
    NOT_EXPORTABLE,
    Aval,
    AvalError,
    dimension_variables,
    evaluate_shape,
    parse_aval,
)
from stagec.core.sizes.size import FUNCTIONS, DimensionError, canonical_dimension, evaluate, parse, parse_constraint
from tests.building import COMPILER

EXAMPLE = 'write for example "f32[batch,64]" (dtype[dim,dim,...]; a name is a symbolic dimension)'


@pytest.mark.parametrize(
    ("text", "aval", "canonical"),
    [
        ("f32[batch,64]", Aval("f32", ("batch", 64)), "f32[batch,64]"),
        ("f32", Aval("f32", ()), "f32[]"),
        ("bf16[]", Aval("bf16", ()), "bf16[]"),
        (" i8 [ 3 , ] ", Aval("i8", (3,)), "i8[3]"),
        ("f32[0]", Aval("f32", (0,)), "f32[0]"),
        ("~f32[]", Aval("f32", (), weak_type=True), "~f32[]"),
        ("key<fry>[2]", Aval("key<fry>", (2,)), "key<fry>[2]"),
        ("f8_e4m3fn[n]", Aval("f8_e4m3fn", ("n",)), "f8_e4m3fn[n]"),
        ("f32[1 + seq*2, max(a, b)]", Aval("f32", ("2*seq+1", "max(a,b)")), "f32[2*seq+1,max(a,b)]"),
        ("f32[(a+1)*(a-1)]", Aval("f32", ("a^2-1",)), "f32[a^2-1]"),
        ("f32[2*3]", Aval("f32", (6,)), "f32[6]"),
    ],
)
def test_parse(text: str, aval: Aval, canonical: str) -> None:
    assert parse_aval(text) == aval
    assert str(aval) == canonical


@pytest.mark.parametrize(
    ("text", "what", "write"),
    [
        ("f32[batch,64", '"f32[batch,64": missing "]" in aval', EXAMPLE),
        ("f32 batch,64]", '"f32 batch,64]": missing "[" in aval', EXAMPLE),
        ("f32[3]x", '"f32[3]x": "x" after the aval', EXAMPLE),
        ("[3]", '"[3]": missing dtype in aval', EXAMPLE),
        ("", '"": missing dtype in aval', EXAMPLE),
        ("float32[3]", '"float32[3]": "float32" is not a short dtype name', "write f32"),
        ("bfloat16", '"bfloat16": "bfloat16" is not a short dtype name', "write bf16"),
        ("f8e4m3fn[3]", '"f8e4m3fn[3]": unknown dtype "f8e4m3fn"', "write f8_e4m3fn"),
        ("fp32[3]", '"fp32[3]": unknown dtype "fp32"', "write f32"),
        ("float[3]", '"float[3]": unknown dtype "float"', "write f32"),
        ("int[3]", '"int[3]": unknown dtype "int"', "write i32"),
        ("zzz", '"zzz": unknown dtype "zzz"', f"write one of {', '.join(DTYPES)}"),
        ("f32[-1]", '"f32[-1]": negative dimension -1', EXAMPLE),
        ("f32[3,,4]", '"f32[3,,4]": empty dimension', EXAMPLE),
        ("f32[,]", '"f32[,]": empty dimension', EXAMPLE),
        ("f32[a b]", '"f32[a b]": bad dimension expression "a b"', EXAMPLE),
        ("f32[a/2]", '"f32[a/2]": bad dimension expression "a / 2"', EXAMPLE),
        ("f32[2.5]", '"f32[2.5]": bad dimension expression "2.5"', EXAMPLE),
        ("f32[_]", '"f32[_]": bad dimension expression "_"', EXAMPLE),
        ("f32[...]", '"f32[...]": bad dimension expression "..."', EXAMPLE),
        ("f32[True]", '"f32[True]": bad dimension expression "True"', EXAMPLE),
        ("f32[mod]", '"f32[mod]": bad dimension expression "mod"', EXAMPLE),
        ("f32[max(a)]", '"f32[max(a)]": bad dimension expression "max(a)"', EXAMPLE),
        ("f32[len(a)]", '"f32[len(a)]": bad dimension expression "len(a)"', EXAMPLE),
        ("f32[a^a]", '"f32[a^a]": bad dimension expression "a ^ a"', EXAMPLE),
        ("f32[a^99]", '"f32[a^99]": power 99 is over the limit of 64', EXAMPLE),
        ("f32[9^8^8]", '"f32[9^8^8]": bad dimension expression "9 ^ 8 ^ 8"', EXAMPLE),
        (
            "f32[((a+b+c+d)^8)^8]",
            '"f32[((a+b+c+d)^8)^8]": a product of more than 1000 terms, or of a degree over 64',
            EXAMPLE,
        ),
        (
            "f32[(((a^8)^8)^8)^8]",
            '"f32[(((a^8)^8)^8)^8]": a product of more than 1000 terms, or of a degree over 64',
            EXAMPLE,
        ),
        (
            "f32[((9^8)^8)^8]",
            '"f32[((9^8)^8)^8]": a dimension of more than 1000 terms, or of 64 bits',
            EXAMPLE,
        ),
        (
            f"f32[{'-' * 200}a]",
            f'"f32[{"-" * 200}a]": dimension expression nested deeper than 100 levels',
            EXAMPLE,
        ),
        (f"f32[{'a' * 10_000}]", f'"f32[{"a" * 36}...": over 10,000 characters', EXAMPLE),
        ("f32[floordiv(a,0)]", '"f32[floordiv(a,0)]": division by zero', EXAMPLE),
        ("f32[max(a,2]", '"f32[max(a,2]": parentheses do not match', EXAMPLE),
        ("f32[a == 2]", '"f32[a == 2]": bad dimension expression "a == 2"', EXAMPLE),
        ("f32[é]", '"f32[é]": bad dimension expression "é"', EXAMPLE),
    ],
)
def test_parse_refuses(text: str, what: str, write: str) -> None:
    with pytest.raises(AvalError) as caught:
        parse_aval(text)
    assert (caught.value.what, caught.value.write) == (what, write)
    assert str(caught.value) == f"{what}; {write}"


def _expressions() -> st.SearchStrategy[str]:
    atoms = st.one_of(st.sampled_from(["batch", "seq", "n"]), st.integers(0, 9).map(str))

    def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        infix = st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda parts: f"({' '.join(parts)})")
        calls = st.tuples(st.sampled_from(["max", "min", "mod", "floordiv"]), inner, inner)
        return st.one_of(infix, calls.map(lambda parts: f"{parts[0]}({parts[1]}, {parts[2]})"))

    return st.recursive(atoms, combine, max_leaves=6)


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.one_of(st.integers(0, 10**6), st.just("batch"))), st.booleans())
def test_round_trip(dtype: str, shape: list[int | str], weak_type: bool) -> None:
    aval = Aval(dtype, tuple(shape), weak_type)
    assert parse_aval(str(aval)) == aval


@given(_expressions(), st.fixed_dictionaries({name: st.integers(0, 50) for name in ("batch", "seq", "n")}))
def test_the_canonical_spelling_keeps_the_value(text: str, sizes: dict[str, int]) -> None:
    try:
        expected = evaluate(text, sizes)
        canonical = canonical_dimension(text)
    except DimensionError:
        return
    if isinstance(canonical, int):
        assert canonical == expected
    else:
        assert evaluate(canonical, sizes) == expected
        assert canonical_dimension(canonical) == canonical


@given(_expressions(), st.fixed_dictionaries({name: st.integers(1, 50) for name in ("batch", "seq", "n")}))
def test_jax_and_stagec_read_each_other(text: str, sizes: dict[str, int]) -> None:
    export, errors = pytest.importorskip("jax.export"), pytest.importorskip("jax.errors")
    try:
        canonical = canonical_dimension(text)
        expected = evaluate(text, sizes)
    except DimensionError:
        return
    if isinstance(canonical, int):
        return
    try:
        (dimension,) = export.symbolic_shape(canonical)
    except errors.InconclusiveDimensionOperation:
        assume(False)  # a divisor that may be 0, in what JAX must compare
    assert evaluate(str(dimension), sizes) == expected


def test_a_divisor_that_may_be_0_is_none_of_jax() -> None:
    export, errors = pytest.importorskip("jax.export"), pytest.importorskip("jax.errors")
    text = str(canonical_dimension("max(batch, floordiv(batch, (batch - seq)))"))
    assert evaluate(text, {"batch": 1, "seq": 2}) == 1
    with pytest.raises(errors.InconclusiveDimensionOperation, match="Possible division by 0"):
        export.symbolic_shape(text)


def test_dimension_variables() -> None:
    assert dimension_variables((1, "2*seq+1", "max(batch,seq)", 3)) == ("batch", "seq")
    assert dimension_variables((1, 2)) == ()


def test_evaluate_shape() -> None:
    shape = ("batch", 3, "2*seq-1", "floordiv(seq,2)", "mod(batch,3)", "batch^2")
    assert evaluate_shape(shape, {"batch": 8, "seq": 5}) == (8, 3, 9, 2, 2, 64)
    assert evaluate_shape((), {}) == ()


@pytest.mark.parametrize(
    ("dim", "what", "write"),
    [
        ("seq", '"seq": dimension "seq" has no size', "the sizes given are: none"),
        ("seq+batch", '"seq+batch": dimension "seq" has no size', "the sizes given are: batch = 2"),
        ("batch-3", '"batch-3" is -1 for batch = 2', "a dimension is 0 or more"),
        ("mod(3,batch-2)", '"mod(3,batch-2)": division by zero', "the sizes given are: batch = 2"),
    ],
)
def test_evaluate_shape_refuses(dim: str, what: str, write: str) -> None:
    with pytest.raises(AvalError) as caught:
        evaluate_shape((dim,), {"batch": 2})
    assert (caught.value.what, caught.value.write) == (what, write)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("batch % 8 == 0", "mod(batch,8) == 0"),
        ("batch>=8", "batch >= 8"),
        ("batch > 8", "batch >= 9"),
        ("batch < 2*seq", "batch+1 <= 2*seq"),
        ("16 == batch", "batch == 16"),
        ("batch // 2 <= seq", "floordiv(batch,2) <= seq"),
    ],
)
def test_constraints(text: str, canonical: str) -> None:
    assert str(parse_constraint(text)) == canonical
    export = pytest.importorskip("jax.export")
    export.symbolic_shape("batch, seq", constraints=[canonical])


@pytest.mark.parametrize("text", ["batch", "batch != 8", "1 <= batch <= 8", "batch = 8", "", "batch == "])
def test_constraints_refuse(text: str) -> None:
    with pytest.raises(DimensionError):
        parse_constraint(text)


@pytest.mark.parametrize(
    ("text", "compare"),
    [("batch == 8", operator.eq), ("batch >= 8", operator.ge), ("batch <= 8", operator.le), ("batch > 8", operator.gt)],
)
def test_constraint_holds(text: str, compare: Callable[[int, int], bool]) -> None:
    for size in (7, 8, 9):
        assert parse_constraint(text).holds({"batch": size}) == compare(size, 8)


def test_the_table_has_the_dtypes_that_jax_can_export() -> None:
    pytest.importorskip("jax")
    from jax._src import dtypes
    from jax._src.export import serialization

    exportable = {
        "f0" if dtype == dtypes.float0 else dtypes.short_dtype_name(dtype)
        for dtype in serialization._dtype_to_dtype_kind
    }
    assert DTYPES.keys() - NOT_EXPORTABLE.keys() == exportable
    every = {dtypes.short_dtype_name(dtype) for dtype in dtypes._jax_types if dtype != dtypes.float0}
    assert every <= DTYPES.keys()


def test_the_table_agrees_with_numpy() -> None:
    jax = pytest.importorskip("jax")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    keys = [jax.random.key(0, impl=implementation) for implementation in ("threefry2x32", "rbg", "unsafe_rbg")]
    words = {str(key.dtype): jax.random.key_data(key) for key in keys}
    for short, (name, bits) in DTYPES.items():
        if short in words:
            assert (words[short].dtype.name, words[short].nbytes * 8) == (name, bits)
        elif short != "f0":
            dtype = jax.numpy.dtype(name)
            small = ml_dtypes.iinfo if short[0] in "iu" else ml_dtypes.finfo
            assert bits == (small(dtype).bits if bits < 8 else dtype.itemsize * 8), short


@pytest.mark.parametrize(("value", "field"), [(Aval("f32", ("n", 2)), "shape"), (parse("2*n+1"), "terms")])
def test_what_keys_have_does_not_change(value: object, field: str) -> None:
    with pytest.raises(AttributeError, match="does not change: make another one"):
        setattr(value, field, ())
    with pytest.raises(AttributeError, match="does not change: make another one"):
        delattr(value, field)
    assert copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value
    assert len({value, copy.copy(value)}) == 1


@pytest.mark.parametrize(
    "text", ["batch", "_n", "n1", "N", "_", "1n", "max", "mod", "lambda", "a b", "a.b", "n\u00e9", ""]
)
def test_a_name_alone_is_what_the_parser_takes_for_one(text: str) -> None:
    try:
        parsed = parse(f"{text}+0")  # not a name alone, so it is parsed
    except DimensionError:
        assert not names.is_name(text)
    else:
        assert names.is_name(text) == (str(parsed) == text)
    assert {*names.FUNCTIONS} == {*FUNCTIONS}


def test_sizes_that_are_names_need_no_parser() -> None:
    script = """
import sys
from stagec.core.sizes.avals import dimension_variables, evaluate_shape, parse_aval
shape = parse_aval("f32[batch,64]").shape
print(dimension_variables(shape), evaluate_shape(shape, {"batch": 2}), "stagec.core.sizes.size" in sys.modules)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env={"PYTHONPATH": str(COMPILER)}, capture_output=True, text=True, check=True)
    assert done.stdout == "('batch',) (2, 64) False\n"
