"""How arrays get to devices and back, for every way in which they may lie there."""

import numpy as np
import pytest
from jaxlib import xla_client

from stagec.runtime import clients
from stagec.runtime.arrays import Sharding, put

X = np.arange(16, dtype=np.float32).reshape(4, 4)


def over_four(text: str) -> Sharding:
    """The sharding over four devices that XLA writes so."""
    return Sharding(tuple(clients.devices("cpu", 4)), xla_client.HloSharding.from_string(text))


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "{replicated}",
        "{devices=[4,1]<=[4]}",
        "{devices=[1,4]<=[4]}",
        "{devices=[2,1,2]<=[4] last_tile_dim_replicate}",
        "{devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate}",
        "{devices=[2,2]<=[2,2]T(1,0)}",
    ],
)
def test_an_array_comes_back_as_it_was(text: str, donated: bool) -> None:
    for values in (X, X.T, X[:0]):
        array = put(values, over_four(text), donated)
        np.testing.assert_array_equal(array.numpy(), values)
        parts = [np.shares_memory(shard.data, values) for shard in array.addressable_shards]
        assert not (donated and any(parts))
