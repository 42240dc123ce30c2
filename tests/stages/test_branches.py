"""Of what JAX lowers for several platforms, one platform's part is left."""

import jax
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from jaxlib.mlir import ir

from stagec.stages import mlir
from stagec.stages.branches import inline_known_branches
from stagec.stages.exported import Exported
from stagec.stages.lowering import lower_exported

MODULE = """
func.func public @main(%arg0: tensor<i32>) -> tensor<i32> {{
  %ten = stablehlo.constant dense<10> : tensor<i32>
  %wide = stablehlo.constant dense<1> : tensor<i64>
  %index = {index}
  %0 = "stablehlo.case"(%index) ({{
    stablehlo.return %arg0 : tensor<i32>
  }}, {{
    %one = stablehlo.constant dense<1> : tensor<i32>
    %inner = "stablehlo.case"(%one) ({{
      stablehlo.return %arg0 : tensor<i32>
    }}, {{
      %sum = stablehlo.add %arg0, %ten : tensor<i32>
      stablehlo.return %sum : tensor<i32>
    }}) : (tensor<i32>) -> tensor<i32>
    stablehlo.return %inner : tensor<i32>
  }}) : (tensor<i32>) -> tensor<i32>
  return %0 : tensor<i32>
}}
"""


@pytest.mark.parametrize(
    ("index", "cases", "sums"),
    [
        ("stablehlo.constant dense<0> : tensor<i32>", 0, 0),
        ("stablehlo.constant dense<1> : tensor<i32>", 0, 1),
        ("stablehlo.constant dense<7> : tensor<i32>", 0, 1),
        ("stablehlo.constant dense<-1> : tensor<i32>", 0, 1),
        ("stablehlo.convert %wide : (tensor<i64>) -> tensor<i32>", 0, 1),
        ("stablehlo.add %arg0, %ten : tensor<i32>", 1, 1),
    ],
    ids=[
        "the first branch",
        "a branch in a branch",
        "an index too large",
        "a negative index",
        "an index of 64 bits",
        "an index that varies",
    ],
)
def test_a_known_branch_is_inlined(index: str, cases: int, sums: int) -> None:
    with mlir.make_context():
        module = ir.Module.parse(MODULE.format(index=index))
        inline_known_branches(module)
        assert module.operation.verify()
        text = str(module)
    assert text.count("stablehlo.case") == cases
    assert text.count("stablehlo.add %arg0, %c") == sums + (index.startswith("stablehlo.add"))


@pytest.mark.parametrize("enable_x64", [False, True], ids=["", "x64"])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_no_platform_is_left_in_a_part_that_is_partitioned_by_hand(platform: str, enable_x64: bool) -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("d")

    def factor(x: jax.Array) -> jax.Array:
        whole = lax.all_gather(x, "d", tiled=True)
        return lax.linalg.cholesky(whole @ whole.T)[:4]

    function = jax.shard_map(factor, mesh=mesh, in_specs=spec, out_specs=spec)
    aval = jax.ShapeDtypeStruct((16, 16), "float32", sharding=jax.sharding.NamedSharding(mesh, spec))
    with jax.enable_x64(enable_x64):
        exported = jax.export.export(jax.jit(function), platforms=["cpu", "cuda", "tpu"])(aval)
    lowered = lower_exported(Exported.deserialize(exported.serialize()), platform, {})
    assert "stablehlo.case" not in lowered.as_text()
    calls = {"cpu": ("lapack_spotrf_ffi",), "cuda": ("cusolver_potrf_ffi",), "tpu": ()}[platform]
    assert lowered.custom_calls == calls
