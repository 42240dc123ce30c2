"""How arrays get to devices and back, for every way in which they may lie there."""

import numpy as np
import pytest
from jaxlib import xla_client

from stagec.pjrt import clients
from stagec.pjrt.arrays import put
from stagec.pjrt.shardings import Sharding

X = np.arange(16, dtype=np.float32).reshape(4, 4)


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
