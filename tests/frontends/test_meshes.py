"""The mesh of a function says for how many devices it is, as `jax.set_mesh` does for `jax.jit`.

Modules: `frontends/jax/export.py`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from stagec.stages.exported import Exported
from tests.building import action_environment
from tests.frontends.workspace import export, spec

MODELS = {
    "jax": """
import jax
from jax import lax
from jax import shard_map
from jax.sharding import PartitionSpec as P
""",
    "arrays": """
from stagec import PartitionSpec as P
from stagec_arrays import lax, shard_map
""",
}
FUNCTIONS = """

def plain(x):
    return x * 2


def constrained(x):
    return lax.with_sharding_constraint(x * 2, P("data"))


def summed(x):
    return shard_map(lambda part: lax.psum(part, "data"), in_specs=P("data"), out_specs=P())(x)
"""


@pytest.mark.parametrize("frontend", ["jax", "arrays"])
@pytest.mark.parametrize("function", ["plain", "constrained", "summed"])
def test_a_mesh_without_in_shardings_counts_its_devices(tmp_path: Path, frontend: str, function: str) -> None:
    (tmp_path / "model.py").write_text(MODELS[frontend] + FUNCTIONS)
    asked = {"entry": f"model:{function}", "frontend": frontend, "args": ["f32[8,2]"], "mesh": [["data", 4]]}
    modules = []
    for more in ({}, {"in_shardings": ["unspecified"]}, {"vjp_order": 1}):
        status, said, output = export(tmp_path, spec(**asked, **more))
        assert (status, said) == (0, "")
        exported = Exported.deserialize(output.read_bytes())
        assert exported.nr_devices == 4
        modules.append(exported.mlir_module())
    assert "num_partitions = 4" in modules[0]
    assert modules[0] == modules[1] == modules[2]
    assert ("@Sharding" in modules[0] or "sdy.sharding_constraint" in modules[0]) == (function == "constrained")


MIXED = """
import jax
import numpy as np
import stagec
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)
x = np.arange(16, dtype="float32").reshape(4, 4)
for types in ((AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=types)
    spec = P("a") if types[0] is AxisType.Explicit else P(None, "b")

    def f(x):
        return jax.numpy.sin(x).T * 2

    with jax.set_mesh(mesh):
        for jitted in (stagec.jit(f), stagec.jit(f, in_shardings=NamedSharding(mesh, spec))):
            np.testing.assert_array_equal(jitted(x), jax.jit(f)(x))
        exported = stagec.jit(f).trace(x).export()
        assert exported.nr_devices == 4
        assert stagec.Exported.deserialize(exported.serialize()).mlir_module() == exported.mlir_module()
"""


def test_a_mesh_of_explicit_and_auto_axes() -> None:
    done = subprocess.run([sys.executable, "-c", MIXED], env=action_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


EXPLICIT = """
import jax
from jax.sharding import PartitionSpec as P


def inner(x):
    assert jax.typeof(x).sharding.spec == P("data"), jax.typeof(x)
    return x * 2


def f(x):
    return jax.sharding.explicit_axes(inner, axes=("data",), in_sharding=(P("data"),))(x)
"""


def test_explicit_axes_in_a_part_of_a_function_of_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(EXPLICIT)
    asked = spec(entry="model:f", frontend="jax", args=["f32[4]"], mesh=[["data", 2], ["model", 2]])
    status, said, output = export(tmp_path, asked)
    assert (status, said) == (0, "")
    assert Exported.deserialize(output.read_bytes()).nr_devices == 4
