"""How arrays get to devices and back, for every way in which they may lie there, and to other libraries by DLPack.

Modules: `pjrt/shardings.py`.
"""

import ctypes
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxlib import xla_client

import stagec
import stagec_arrays.numpy as xp
from stagec.core.sizes.avals import parse_aval
from stagec.pjrt import clients
from stagec.pjrt.arrays import put, single_device, zeros
from stagec.pjrt.shardings import Sharding

X = np.arange(16, dtype=np.float32).reshape(4, 4)


def test_zeros_take_no_memory() -> None:
    for text, shape, dtype in (
        ("f32[3,4]", (3, 4), "float32"),
        ("key<fry>[3]", (3, 2), "uint32"),
        ("bf16", (), "bfloat16"),
    ):
        made = zeros(parse_aval(text))
        assert (made.shape, made.dtype.name, made.strides, made.any()) == (shape, dtype, (0,) * len(shape), False)


def over_four(text: str) -> Sharding:
    """The sharding over four devices that XLA writes so."""
    return Sharding(tuple(clients.devices("cpu", 4)), xla_client.HloSharding.from_string(text))


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("{replicated}", [0, 1, 2, 3]),
        ("{devices=[4,1]<=[4]}", [0, 0, 0, 0]),
        ("{devices=[1,4]<=[4]}", [0, 0, 0, 0]),
        ("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", [0, 1, 0, 1]),
        ("{devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate}", [0, 0, 1, 1]),
        ("{devices=[2,2]<=[2,2]T(1,0)}", [0, 0, 0, 0]),
        ("{unreduced}", [0, 0, 0, 0]),
        ("{devices=[1,1,4]<=[4] last_tile_dims={unreduced}}", [0, 0, 0, 0]),
        ("{devices=[1,1,2,2]<=[4] last_tile_dims={unreduced, replicated}}", [0, 1, 0, 1]),
        ("{devices=[1,1,2,2]<=[2,2]T(1,0) last_tile_dims={unreduced, replicated}}", [0, 0, 1, 1]),
        ("{devices=[2,1,2]<=[4] last_tile_dims={unreduced}}", [0, 0, 0, 0]),
    ],
)
def test_an_array_comes_back_as_it_was(text: str, copies: list[int], donated: bool) -> None:
    for values in (X, X.T, X[:0], X.astype(np.int8), X > 3):
        array = put(values, over_four(text), donated)
        np.testing.assert_array_equal(array.numpy(), values)
        np.testing.assert_array_equal(array.copy().numpy(), values)
        shards = array.addressable_shards
        assert not donated or not any(np.shares_memory(shard.data, values) for shard in shards)
        if values.size:
            assert [shard.replica_id for shard in shards] == copies


@pytest.mark.parametrize(
    "text", ["{manual}", "{unknown}", "{maximal device=1}", "{devices=[2,1,2]<=[4] last_tile_dims={manual}}"]
)
def test_parts_that_are_of_no_array(text: str) -> None:
    with pytest.raises(ValueError, match="has no parts that can be put together") as error:
        over_four(text).parts((4, 4))
    assert text in str(error.value)


class Old:
    """An array's DLPack as libraries ask for it that know no version 1.0, PyTorch before 2.5 among them."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, stream: Any = None, **newer: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device


@pytest.mark.parametrize("make", [stagec.device_put, xp.asarray])
def test_dlpack_shares_memory(make: Any) -> None:
    array = make(X)
    place = array.numpy().ctypes.data
    assert jnp.from_dlpack(array).unsafe_buffer_pointer() == place
    for values in (np.from_dlpack(array), np.from_dlpack(array, copy=False), np.from_dlpack(Old(array))):
        np.testing.assert_array_equal(values, X)
        assert (values.ctypes.data, values.flags.writeable) == (place, False)
    copied = np.from_dlpack(array, copy=True)
    np.testing.assert_array_equal(copied, X)
    assert copied.ctypes.data != place
    np.testing.assert_array_equal(xp.from_dlpack(array), X)
    assert np.from_dlpack(array, device="cpu").ctypes.data == place


def test_a_call_does_not_write_to_memory_that_is_shared() -> None:
    increment = stagec.jit(lambda x: x + 1, frontend="arrays", donate_argnums=0)
    x = increment(xp.asarray(X))
    shared = jnp.from_dlpack(x)
    np.testing.assert_array_equal(increment(x), X + 2)
    np.testing.assert_array_equal(shared, X + 1)
    del shared
    x = increment(x)
    increment(x)
    with pytest.raises(stagec.CallError, match="was donated"):
        np.from_dlpack(x)


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float8_e4m3fn", "complex64", "uint16"])
def test_dlpack_has_the_dtypes_that_jax_gives_it(dtype: str) -> None:
    values = np.asarray([0, 1, 1]).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    for array in (stagec.device_put(values), xp.asarray(values)):
        taken = jnp.from_dlpack(array)
        assert taken.dtype == values.dtype
        np.testing.assert_array_equal(taken, values)
    for array in (stagec.device_put(values), jnp.asarray(values)):
        np.testing.assert_array_equal(xp.from_dlpack(array), values)


def test_reading_bfloat16_makes_no_type() -> None:
    """A new prototype of a function of C is a type, and took five times as long as the rest of the reading."""
    array = stagec.device_put(np.ones(3, ml_dtypes.bfloat16))
    array.numpy()
    types: Any = ctypes.PYFUNCTYPE(None).__base__
    before = len(types.__subclasses__())
    kept = [stagec.device_put(np.ones(3, ml_dtypes.bfloat16)).numpy() for _ in range(5)]
    assert len(kept) == 5
    assert len(types.__subclasses__()) == before


def test_dlpack_keeps_the_order_of_elements() -> None:
    array = put(X, single_device(), layout="{0,1}")
    values = np.from_dlpack(array)
    np.testing.assert_array_equal(values, X)
    assert values.strides == (4, 16)


def test_what_dlpack_does_not_take() -> None:
    four = put(X, over_four("{devices=[4,1]<=[4]}"))
    for ask in (four.__dlpack__, four.__dlpack_device__):
        with pytest.raises(BufferError, match="on one device; give it the data of addressable_shards"):
            ask()
    with pytest.raises(BufferError, match=r"DLPack does not take an array of int4: .*S4"):
        np.from_dlpack(xp.asarray([1], dtype=xp.int4))
    with pytest.raises(BufferError, match=r"on DLPack's device \(1, 0\), not on \(2, 0\)"):
        stagec.device_put(X).__dlpack__(dl_device=(2, 0))


def test_dlpack_of_a_traced_array() -> None:
    def function(x: Any) -> Any:
        assert np.from_dlpack(xp.ones(2)).tolist() == [1, 1]
        return np.from_dlpack(x)

    with pytest.raises(TypeError, match="DLPack needs the elements of an array that is traced"):
        stagec.jit(function, frontend="arrays")(X)
