"""What the keys of a function do to its artifact, and which functions cannot be built. Each case runs the command.

Modules: `frontends/declarations.py`, `frontends/stablehlo.py`, `pjrt/custom_calls.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.export import _export as jax_export

from stagec.core.builds.specs import to_json
from stagec.core.trees.nodes import Fields
from stagec.pjrt import custom_calls
from stagec.stages.exported import Exported
from tests.building import ROOT, stagec
from tests.frontends import workspace as small

MODEL = """\
import collections
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp

Point = collections.namedtuple("Point", "x y")
Named = collections.namedtuple("Named", "x")
jax.export.register_namedtuple_serialization(Named, serialized_name="my.Named")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=["sizes"])
@dataclasses.dataclass
class Plain:
    a: jax.Array
    sizes: tuple[int, ...] = (1, 2)


@jax.tree_util.register_pytree_node_class
class Opaque:
    def __init__(self, a):
        self.a = a

    def tree_flatten(self):
        return (self.a,), threading.Lock()

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=["activation"])
@dataclasses.dataclass
class Activated:
    a: jax.Array
    activation: object = dataclasses.field(default_factory=lambda: (i for i in ()))


def double(x):
    return 2 * x


def product(x, y):
    return x @ y


def twice(x):
    return jnp.concatenate([x, x])


def keyed(key, x, *, scale):
    return jax.random.normal(key, x.shape) * scale + x


def scaled(x, unused=None, *, scale):
    return x * scale


def trees(point, plain):
    return {
        "point": point,
        "named": Named(point.x),
        "plain": plain,
        "ordered": collections.OrderedDict(b=point.x, a=point.y),
    }


def trees_avals():
    vector = jax.ShapeDtypeStruct((2,), jnp.float32)
    return Point(vector, vector), Plain(vector)


def undescribed(x):
    return Opaque(x), Activated(x), [Opaque(x)]


def tell(x):
    return x


def told_under_vmap(x):
    return jax.vmap(lambda row: jax.experimental.io_callback(tell, row, row))(x)


def prints(x):
    jax.debug.print("x = {}", x)

    def body(carry, _):
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((2, 3), jnp.float32), carry), None

    return jax.lax.scan(body, x, length=2)[0]


def dead_callback(x):
    jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((2, 3), jnp.float32), x)
    return x


@jax.custom_vjp
def talks_backwards(x):
    return 2 * x


talks_backwards.defvjp(lambda x: (2 * x, None), lambda _, ct: (jax.pure_callback(lambda a: a, ct, ct),))


def talks_in_its_gradient(x):
    return jnp.sin(talks_backwards(x))


def foreign(x):
    return jax.ffi.ffi_call("their_kernel", jax.ShapeDtypeStruct((2, 3), jnp.float32))(x)


def pivoted(x):
    return jax.scipy.linalg.qr(x, pivoting=True)


def sharded(params, x, *, n):
    total = jax.shard_map(
        lambda a: jax.lax.psum(a, "data"), in_specs=jax.P("data"), out_specs=jax.P()
    )(x)
    y = jax.lax.with_sharding_constraint(x @ params["w"] * n + params["b"][0], jax.P("data"))
    return {"y": y, "total": [total]}
"""


LIBRARIES = """\
import equinox as eqx
import flax.core
import flax.struct
import jax
from flax import nnx


@flax.struct.dataclass
class Struct:
    a: jax.Array
    mode: str = flax.struct.field(pytree_node=False, default="train")


class Module(eqx.Module):
    linear: eqx.nn.Linear
    scale: float = eqx.field(static=True)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs)])


def net_avals():
    return nnx.eval_shape(lambda: Net(nnx.Rngs(0))), jax.ShapeDtypeStruct((4, 4), "float32")


def net(net, x):
    return net.layers[0](x)


def modules(x):
    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    return Struct(x), Module(linear, 0.5), flax.core.freeze({"b": x, "a": x})
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    (root / "pkg").mkdir()
    (root / "pkg" / "keys.py").write_text(MODEL)
    (root / "pkg" / "libraries.py").write_text(LIBRARIES)
    (root / "pkg" / "scale.mlir").write_text(SCALE)
    (root / "pkg" / "broken.mlir").write_text("module {\n  func.func @main() { retur }\n}\n")
    (root / "pkg" / "nothing.mlir").write_text("module { func.func @other() { return } }")
    (root / "pkg" / "dynamic.mlir").write_text(
        "module { func.func @main(%a: tensor<?xf32>) -> tensor<?xf32> { return %a : tensor<?xf32> } }"
    )
    (root / "pkg" / "foreign.mlir").write_text(FOREIGN)
    return root


def export(workspace: Path, changes: Mapping[str, Any]) -> tuple[int, str, bytes]:
    """Return exit status, stderr and the artifact (b"" when there is none)."""
    status, stderr, output = small.export(workspace, small.spec(**changes))
    return status, stderr, output.read_bytes() if output.exists() else b""


def exported(workspace: Path, **changes: Any) -> Exported:
    status, stderr, serialized = export(workspace, changes)
    assert (status, stderr) == (0, "")
    return Exported.deserialize(serialized)


def test_matmul_precision(workspace: Path) -> None:
    changes = {"entry": "pkg.keys:product", "args": ["f32[2,3]", "f32[3,2]"]}
    texts = []
    for precision in (None, "highest", "BF16_BF16_F32_X3"):
        _, _, serialized = export(workspace, {**changes, "matmul_precision": precision})
        texts.append(jax.export.deserialize(bytearray(serialized)).mlir_module())
    assert "HIGHEST" not in texts[0]
    assert "precision = [HIGHEST, HIGHEST]" in texts[1]
    assert "num_primitive_operations = 3" in texts[2]


def test_keys_kwargs_weak_types_and_x64(workspace: Path) -> None:
    artifact = exported(
        workspace,
        entry="pkg.keys:keyed",
        args=["key<fry>[]", "f64[2]"],
        kwargs={"scale": "~f64[]"},
        enable_x64=True,
    )
    assert [str(aval) for aval in artifact.in_avals] == ["key<fry>[]", "f64[2]", "f64[]"]
    assert artifact.in_tree.to_json() == {"tuple": [{"tuple": ["*", "*"]}, {"dict": {"scale": "*"}}]}
    assert [str(aval) for aval in artifact.out_avals] == ["f64[2]"]
    # A weak type gives way to the other operand's.
    for scale, result in (("~f32[]", "bf16[2]"), ("f32[]", "f32[2]")):
        mixed = exported(workspace, entry="pkg.keys:scaled", args=["bf16[2]"], kwargs={"scale": scale})
        assert [str(aval) for aval in mixed.out_avals] == [result]


def test_unused_arguments(workspace: Path) -> None:
    for keep_unused, kept in ((False, (0, 2)), (True, (0, 1, 2))):
        artifact = exported(
            workspace,
            entry="pkg.keys:scaled",
            args=["f32[2]", "i32[3]"],
            kwargs={"scale": "f32[]"},
            keep_unused=keep_unused,
        )
        assert artifact.module_kept_var_idx == kept


def test_disabled_checks(workspace: Path) -> None:
    artifact = exported(
        workspace, entry="pkg.keys:foreign", disabled_checks=["platform"], allow_custom_calls=["their_kernel"]
    )
    assert set(artifact.disabled_safety_checks) == {"platform", "custom_call:their_kernel"}


def test_custom_calls_of_this_jaxlib_are_allowed_by_themselves(workspace: Path) -> None:
    artifact = exported(workspace, entry="pkg.keys:pivoted")
    assert "custom_call:lapack_sgeqp3_ffi" in artifact.disabled_safety_checks


def test_classes_of_custom_calls() -> None:
    if jax.__version__ == "0.10.1":  # the pinned JAX, whose list it is
        assert custom_calls._GUARANTEED == jax_export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE
    assert custom_calls.provider("lapack_spotrf_ffi") == "guaranteed"
    assert custom_calls.provider("lapack_sgeqp3_ffi") == "same toolchain"
    assert custom_calls.provider("TopK") == "same toolchain"
    assert custom_calls.provider("their_kernel") == "unknown"


TAKE_OUT = """\
  take it out of the function; what it computes can be a result
  host_callbacks = "drop" would not help: this callback has results
"""
NOT_BUILT = {
    "padding that is not at the end": (
        {
            "entry": "pkg.keys:twice",
            "args": ["f32[n]"],
            "kwargs": {},
            "padding": {"n": {"fill": 0, "mask": "valid"}},
        },
        "pkg/m.toml: functions.f.padding.n: result is f32[2*n]: "
        "where n is padded, its real elements are not its first\n"
        "  leave it out, or return an array whose size is the name\n"
        "pkg/m.toml: functions.f.padding.n: no keyword argument 'valid'\n"
        "  name one that the function takes\n",
    ),
    "a custom call that nobody provides": (
        {"entry": "pkg.keys:foreign"},
        "pkg/m.toml: functions.f: custom calls that neither JAX nor jaxlib provides: their_kernel\n"
        '  write allow_custom_calls = ["their_kernel"], and register them where the artifact is loaded\n',
    ),
    "host callbacks": (
        {"entry": "pkg.keys:prints"},
        "pkg/m.toml: functions.f: pkg/keys.py:{print}: a host callback (debug_print) cannot be built ahead of time\n"
        '  write host_callbacks = "drop" to build the function without it, or take it out\n'
        "pkg/m.toml: functions.f: pkg/keys.py:{callback}: a host callback (pure_callback) cannot be built ahead of "
        f"time\n{TAKE_OUT}",
    ),
    "a host callback in the gradient": (
        {"entry": "pkg.keys:talks_in_its_gradient", "vjp_order": 1},
        "pkg/m.toml: functions.f: pkg/keys.py:{gradient}: a host callback (pure_callback) cannot be built ahead of "
        f"time\n{TAKE_OUT}",
    ),
    "a host callback under vmap": (
        {"entry": "pkg.keys:told_under_vmap"},
        "pkg/m.toml: functions.f: pkg/keys.py:{told}: a host callback (io_callback) cannot be built ahead of time\n"
        f"{TAKE_OUT}",
    ),
    "types that cannot be described": (
        {"entry": "pkg.keys:undescribed", "variant": "v"},
        "pkg/m.toml: functions.f.variants.v: the result has a pkg.keys.Opaque (your class), which cannot be described: "
        "it is a _thread.lock, which means nothing in another process\n"
        "  register it below its class:\n"
        "  jax.export.register_pytree_node_serialization(Opaque, serialized_name='pkg.keys:Opaque',\n"
        "      serialize_auxdata=..., deserialize_auxdata=...)\n"
        "pkg/m.toml: functions.f.variants.v: the result has a pkg.keys.Activated (your class), which cannot be "
        "described: "
        "activation is a generator, which means nothing in another process\n"
        "  register it below its class:\n"
        "  jax.export.register_pytree_node_serialization(Activated, serialized_name='pkg.keys:Activated',\n"
        "      serialize_auxdata=..., deserialize_auxdata=...)\n",
    ),
    "shardings of another tree": (
        {
            "entry": "pkg.keys:sharded",
            "args": [{"w": "f32[4,4]", "b": "f32[4]"}, "f32[4,4]"],
            "static": {"n": 2},
            "mesh": [["data", 2]],
            "out_shardings": {"y": "P()", "z": "P()"},
        },
        "pkg/m.toml: functions.f.out_shardings: y, z are given, but the tree has total, y there\n"
        "  write the same names\n",
    ),
    "too few shardings": (
        {
            "entry": "pkg.keys:sharded",
            "args": [{"w": "f32[4,4]", "b": "f32[4]"}, "f32[4,4]"],
            "static": {"n": 2},
            "mesh": [["data", 2]],
            "in_shardings": ["P()"],
        },
        "pkg/m.toml: functions.f.in_shardings: 1 shardings are given for 2 elements\n"
        "  write one for each, or one for all\n",
    ),
    "a StableHLO file that is missing": (
        {"entry": "none.mlir"},
        "pkg/m.toml: functions.f.entry: no file pkg/none.mlir\n"
        "  name the file in data, relative to the manifest's folder\n",
    ),
    "a StableHLO file that does not parse": (
        {"entry": "broken.mlir"},
        "pkg/m.toml: functions.f.entry: pkg/broken.mlir is not a StableHLO module: "
        "line 2, column 23: custom op 'retur' is unknown",
    ),
    "a StableHLO file without main": (
        {"entry": "nothing.mlir"},
        "pkg/m.toml: functions.f.entry: nothing.mlir has no function main\n  its functions: other\n",
    ),
    "a StableHLO file with a dynamic shape": (
        {"entry": "dynamic.mlir"},
        "pkg/m.toml: functions.f.entry: dynamic.mlir: argument 0 of main is tensor<?xf32>\n"
        "  make it a tensor of static shape\n",
    ),
    "a StableHLO file with a custom call that nobody provides": (
        {"entry": "foreign.mlir"},
        "pkg/m.toml: functions.f: custom calls that neither JAX nor jaxlib provides: their_kernel\n"
        '  write allow_custom_calls = ["their_kernel"], and register them where the artifact is loaded\n',
    ),
}


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(MODEL.splitlines(), 1) if text in line)


@pytest.mark.parametrize("case", NOT_BUILT)
def test_a_function_that_cannot_be_built(workspace: Path, case: str) -> None:
    changes, text = NOT_BUILT[case]
    status, stderr, serialized = export(workspace, changes)
    lines = {"print": "debug.print", "callback": "return jax.pure_", "gradient": "sin(talks_", "told": "def tell("}
    for name, code in lines.items():
        text = text.replace(f"{{{name}}}", str(line_of(code)))
    assert stderr[: len(text)] == text
    assert (status, serialized) == (2, b"")


def test_a_callback_without_effect_is_dropped(workspace: Path) -> None:
    assert exported(workspace, entry="pkg.keys:dead_callback").ordered_effects == ()


def test_effects_are_kept(zoo: Path) -> None:
    artifact = Exported.deserialize((zoo.parent / "zoo.effectful.exported").read_bytes())
    module = "<class 'tests.zoo.effects.{}'>".format
    assert artifact.ordered_effects == (module("Read"), module("Write"))
    assert artifact.unordered_effects == (module("Count"),)


def test_types_are_described(workspace: Path) -> None:
    artifact = exported(workspace, entry="pkg.keys:trees", args=[], avals="pkg.keys:trees_avals")
    nodes = {node.name: node for tree in (artifact.in_tree, artifact.out_tree) for node in tree.custom_nodes()}
    assert {name: node.fields for name, node in nodes.items()} == {
        "pkg.keys:Point": Fields(("x", "y")),
        "my.Named": Fields(("x",)),
        "pkg.keys:Plain": Fields(("a",), {"sizes": (1, 2)}),
        "collections.OrderedDict": Fields(("b", "a")),
    }


def test_modules_of_flax_and_equinox_are_described(workspace: Path) -> None:
    pytest.importorskip("flax")
    pytest.importorskip("equinox")
    artifact = exported(workspace, entry="pkg.libraries:modules", args=["f32[2]"])
    nodes = {node.name: node.fields for node in artifact.out_tree.custom_nodes()}
    assert nodes == {
        "pkg.libraries:Struct": Fields(("a",), {"mode": "train"}),
        "pkg.libraries:Module": Fields(("linear",), {"scale": 0.5}),
        "equinox.nn._linear:Linear": Fields(
            ("weight", "bias"), {"in_features": 2, "out_features": 3, "use_bias": True}
        ),
        "flax.core.frozen_dict:FrozenDict": Fields(("a", "b")),
    }


def test_shardings_name_no_part_without_arrays(workspace: Path) -> None:
    """nnx has some in every module."""
    layer = {"kernel": {"value": "P(None, data)"}, "bias": {"value": "P(data)"}}
    artifact = exported(
        workspace,
        entry="pkg.libraries:net",
        args=[],
        avals="pkg.libraries:net_avals",
        mesh=[["data", 2]],
        in_shardings=[{"layers": {"0": layer}}, "P()"],
    )
    specs = [str(sharding.spec) for sharding in artifact._in_shardings]  # type: ignore[union-attr]
    assert dict(zip(artifact.in_tree.paths(), specs, strict=True)) == {
        "[0][0].layers[0].bias.value": "P(data)",
        "[0][0].layers[0].kernel.value": "P(None, data)",
        "[0][1]": "P()",
    }


def test_shardings_over_a_mesh_without_devices(workspace: Path) -> None:
    _, stderr, serialized = export(
        workspace,
        {
            "entry": "pkg.keys:sharded",
            "args": [{"w": "f32[4,4]", "b": "f32[4]"}, "f32[4,4]"],
            "static": {"n": 2},
            "mesh": [["data", 2], ["model", 4]],
            "in_shardings": [{"w": "P(None, model)", "b": "P()"}, "P(data)"],
            "out_shardings": {"y": "P(data)", "total": ["unspecified"]},
            "vjp_order": 1,
        },
    )
    assert stderr == ""
    artifact = jax.export.deserialize(bytearray(serialized))
    assert (artifact.nr_devices, artifact.vjp().nr_devices) == (8, 8)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=auto)
    b, w, x = (sharding and sharding.spec for sharding in artifact.in_shardings_jax(mesh))
    assert (w, x) == (jax.P(None, "model"), jax.P("data"))
    assert b in (None, jax.P(), jax.P(None))
    assert [sharding and sharding.spec for sharding in artifact.out_shardings_jax(mesh)][1] == jax.P("data")
    assert 'sdy.mesh @mesh = <["data"=2, "model"=4]>' in artifact.mlir_module()


SCALE = """\
module @scale attributes {mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<4x3xf32> {tf.aliasing_output = 0 : i32}, %f: tensor<3xf32>)
      -> (tensor<4x3xf32> {jax.result_info = "y"}, tensor<i1>, tensor<2xui8>, tensor<complex<f32>>) {
    %0 = stablehlo.broadcast_in_dim %f, dims = [1] : (tensor<3xf32>) -> tensor<4x3xf32>
    %1 = func.call @times(%x, %0) : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<4x3xf32>
    %2 = stablehlo.constant dense<true> : tensor<i1>
    %3 = stablehlo.constant dense<[1, 2]> : tensor<2xui8>
    %4 = stablehlo.constant dense<(1.0, 2.0)> : tensor<complex<f32>>
    return %1, %2, %3, %4 : tensor<4x3xf32>, tensor<i1>, tensor<2xui8>, tensor<complex<f32>>
  }
  func.func private @times(%a: tensor<4x3xf32>, %b: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %0 = stablehlo.multiply %a, %b : tensor<4x3xf32>
    return %0 : tensor<4x3xf32>
  }
}
"""
FOREIGN = """\
module {
  func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.custom_call @their_kernel(%x) : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


@pytest.mark.parametrize("platforms", [["cpu"], ["cuda", "cpu"]], ids="-".join)
def test_a_stablehlo_module_runs_in_jax(workspace: Path, platforms: list[str]) -> None:
    status, stderr, serialized = export(workspace, {"entry": "scale.mlir", "platforms": platforms})
    assert (status, stderr) == (0, "")
    artifact = jax.export.deserialize(bytearray(serialized))
    assert artifact.fun_name == "scale"
    assert artifact.platforms == tuple(platforms)
    result = artifact.call(np.ones((4, 3), np.float32), np.arange(3, dtype=np.float32))
    np.testing.assert_array_equal(result[0], np.tile(np.arange(3, dtype=np.float32), (4, 1)))
    assert [value.dtype for value in result] == [jnp.float32, jnp.bool_, jnp.uint8, jnp.complex64]


def test_bytecode_and_portable_artifacts_are_modules_too(workspace: Path) -> None:
    _, _, first = export(workspace, {"entry": "scale.mlir"})
    module = jax.export.deserialize(bytearray(first)).mlir_module_serialized
    (workspace / "pkg" / "scale.mlirbc").write_bytes(module)
    _, stderr, second = export(workspace, {"entry": "scale.mlirbc"})
    assert stderr == ""
    assert second == first


def test_a_stablehlo_module_needs_no_jax(workspace: Path) -> None:
    (workspace / "jax.py").write_text("raise ImportError('jax was imported')\n")
    try:
        (workspace / "f.spec").write_text(to_json(small.spec(entry="scale.mlir")))
        arguments = ("action", "export", "--spec", "f.spec", "--output", "f.exported", "--import-root", ".")
        done = stagec(*arguments, cwd=workspace, env={"PYTHONSAFEPATH": ""})
    finally:
        (workspace / "jax.py").unlink()
    assert (done.returncode, done.stderr) == (0, "")
    assert (workspace / "f.exported").is_file()


def test_effects_have_one_order(zoo: Path, tmp_path: Path) -> None:
    """JAX's own follows the addresses of classes, which are others in every process."""
    for seed in range(2):
        words = ("action", "export", "--spec", zoo.parent / "zoo.effectful.spec", "--output", tmp_path / "again")
        done = stagec(*words, "--import-root", ROOT, env={"PYTHONHASHSEED": str(seed)})
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "again").read_bytes() == (zoo.parent / "zoo.effectful.exported").read_bytes()
