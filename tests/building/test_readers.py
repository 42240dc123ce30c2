"""An artifact in the version of StableHLO that the oldest jaxlib of its targets reads."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from stagec.building import readers
from stagec.core.messages.errors import StagecError
from stagec.stages.exported import Exported
from tests.frontends.workspace import spec

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def versions(serialized: bytes) -> list[str]:
    """Those of the module and of its vector-Jacobian products."""
    return [made.decode() for made in re.findall(rb"StableHLO_v(\d+\.\d+\.\d+)", serialized)]


def artifact() -> bytes:
    exported = jax.export.export(jax.jit(lambda x: jnp.sin(x @ x.T).sum()))(X)
    return bytes(exported.serialize(vjp_order=1))


def test_the_vector_jacobian_product_is_read_too() -> None:
    written, older = artifact(), readers.readable(spec(stablehlo="1.10.0"), artifact())
    assert len(versions(written)) == 2
    assert "1.10.0" not in versions(written)
    assert versions(older) == ["1.10.0", "1.10.0"]
    ours, theirs = Exported.deserialize(older), jax.export.deserialize(bytearray(older))
    np.testing.assert_array_equal(ours.call(X), jax.jit(theirs.call)(X))
    np.testing.assert_array_equal(ours.vjp().call(X, np.float32(1))[0], theirs.vjp().call(X, np.float32(1))[0])


@pytest.mark.parametrize("version", [None, "999.0.0", "own"])
def test_what_all_read_stays_as_it_is(version: str | None) -> None:
    written = artifact()
    own = versions(written)[0] if version == "own" else version
    assert readers.readable(spec(stablehlo=own), written) == written


def test_an_operation_that_the_version_does_not_have() -> None:
    """StableHLO had no floats of four bits in 1.7.0."""
    narrow = jax.export.export(jax.jit(lambda x: x.astype(jnp.float4_e2m1fn).astype(x.dtype)))(X)
    with pytest.raises(StagecError) as error:
        readers.readable(spec(stablehlo="1.7.0"), bytes(narrow.serialize()))
    assert str(error.value).endswith(
        ": it has no form in StableHLO 1.7.0, the newest that the oldest jaxlib of its targets reads: vhlo.convert_v1 "
        "of (!vhlo.tensor_v1<3x4x!vhlo.f32_v1>) -> !vhlo.tensor_v1<3x4x!vhlo.f4E2M1FN_v1>\n"
        "  leave that release out of jaxlib, or take a lock with its jax and jaxlib"
    )
