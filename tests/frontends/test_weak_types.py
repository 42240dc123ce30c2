"""Weak types of example arguments, and JAX's names of options, are as in `jax.jit`.

Modules: `frontends/common/entries.py`, `frontends/jax/tracer.py`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import stagec
import stagec_arrays.numpy
from stagec.stages.exported import Exported
from tests.frontends.workspace import export, spec

MODELS = {
    "jax": "import jax\nimport jax.numpy as np\nfrom jax import ShapeDtypeStruct\n",
    "arrays": "import stagec_arrays.numpy as np\nfrom stagec_arrays.values import ShapeDtypeStruct\n",
}
MODEL = """
half = ShapeDtypeStruct((2,), np.float16)
as_struct = (ShapeDtypeStruct((), np.float32, weak_type=True), half)
as_example = (np.asarray(2.0), half)


def f(scale, x):
    return x * scale
"""


@pytest.mark.parametrize("frontend", ["jax", "arrays"])
@pytest.mark.parametrize("avals", ["as_struct", "as_example"])
def test_a_weak_example_gives_way(tmp_path: Path, frontend: str, avals: str) -> None:
    (tmp_path / "model.py").write_text(MODELS[frontend] + MODEL)
    status, said, output = export(tmp_path, spec(entry="model:f", frontend=frontend, args=[], avals=f"model:{avals}"))
    assert (status, said) == (0, "")
    exported = Exported.deserialize(output.read_bytes())
    strong = "float32" if frontend == "arrays" and avals == "as_example" else "float16"
    expected = jax.eval_shape(lambda scale, x: x * scale, jnp.asarray(2.0), jnp.ones(2, "float16")).dtype
    assert expected == "float16"
    assert [str(aval) for aval in exported.out_avals] == [{"float16": "f16[2]", "float32": "f32[2]"}[strong]]


@pytest.mark.parametrize("frontend", ["jax", "arrays"])
def test_names_that_jax_has(frontend: str) -> None:
    array = jnp.ones(3) if frontend == "jax" else stagec_arrays.numpy.ones(3)
    traced = stagec.jit(lambda x: x * 2, frontend=frontend).trace(array)
    assert traced.lower(lowering_platforms=("tpu",)).as_text() == traced.lower(("tpu",)).as_text()
    with pytest.raises(ValueError, match=r"lower\(\) takes one platform"):
        traced.lower(lowering_platforms=("cpu", "tpu"))
    with pytest.raises(TypeError, match=r"compile\(\) does not take device_assignment: an executable is for a number"):
        traced.lower().compile(device_assignment=(0,))
