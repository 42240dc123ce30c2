"""Partition specs: each has one spelling, which means what JAX's PartitionSpec does."""

import pytest
from jax.sharding import PartitionSpec as P

from stagec.core.sizes.partitions import Partition, PartitionError, parse, write


@pytest.mark.parametrize(
    ("spec", "partition", "spelling"),
    [
        ("P()", (), "P()"),
        ("P(data)", (("data",),), "P(data)"),
        ("P('data', None)", (("data",), ()), "P(data, None)"),
        ("PartitionSpec( None,(x, y) )", ((), ("x", "y")), "P(None, (x, y))"),
        ("P(['x', 'y'])", (("x", "y"),), "P((x, y))"),
        ("P((x,), ())", (("x",), ()), "P(x, None)"),
        ("unspecified", None, "unspecified"),
    ],
)
def test_a_partition_has_one_spelling(spec: str, partition: Partition | None, spelling: str) -> None:
    assert parse(spec) == partition
    assert write(partition) == spelling
    assert parse(spelling) == partition


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data"), P(("x", "y"), None, "z")], ids=str)
def test_jax_writes_what_is_read(spec: P) -> None:
    axes = tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec)
    assert parse(str(spec)) == axes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", '"" is not a partition spec'),
        ("P(", '"P(" is not a partition spec'),
        ("P", '"P" is not a partition spec'),
        ("Q(x)", '"Q(x)" is not a partition spec'),
        ("P(x=1)", '"P(x=1)" is not a partition spec'),
        ("P(1)", '"P(1)": 1 is not the name of an axis'),
        ("P(x.y)", '"P(x.y)": x.y is not the name of an axis'),
        ("P(*x)", '"P(*x)": *x is not the name of an axis'),
        ("P(x, x)", '"P(x, x)": the axis "x" is used twice'),
        ("P((x, y), y)", '"P((x, y), y)": the axis "y" is used twice'),
    ],
)
def test_what_is_not_a_partition(spec: str, message: str) -> None:
    with pytest.raises(PartitionError) as error:
        parse(spec)
    assert error.value.what == message
    assert error.value.write
