"""Binding an `Exported` to a platform and to sizes.

Modules: `pjrt/dialects.py`, `stages/data.py`, `stages/lowering.py`.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.export
import jaxlib
import numpy as np
import pytest
from jax import lax
from jaxlib.mlir.dialects import stablehlo

from stagec.building import compilation
from stagec.core.builds.specs import CpuTarget, ExecutableSpec
from stagec.core.messages.errors import StagecError
from stagec.core.messages.refusal import CallError
from stagec.core.sizes.avals import parse_aval
from stagec.loader.load import compile_exported
from stagec.pjrt.clients import devices
from stagec.stages import mlir
from stagec.stages.errors import CannotLower, SizesDoNotFit
from stagec.stages.exported import Exported
from stagec.stages.lowering import CALLING_CONVENTIONS, lower_exported


def exported(zoo: Path, function: str) -> Exported:
    return Exported.deserialize((zoo.parent / f"zoo.{function}.exported").read_bytes())


def test_the_steps_of_a_compilation_share_a_context(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], mlir.make_context

    def counted() -> Any:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(mlir, "make_context", counted)
    artifact = exported(zoo, "attention")
    with mlir.context():
        lowered = lower_exported(artifact, "cpu", {"batch": 2, "seq": 3})
        mlir.to_portable(lowered.module)
        assert mlir.argument_names(artifact.mlir_module_serialized, len(lowered.kept_var_idx))
    assert len(made) == 1
    assert lowered == lower_exported(artifact, "cpu", {"batch": 2, "seq": 3})
    assert len(made) == 2
    sine = jax.export.export(jax.jit(lax.sin))(np.float32(1))
    assert mlir.inventory(sine.mlir_module_serialized) == {}
    assert len(made) == 2  # there is no custom call to look for
    assert mlir.inventory(artifact.mlir_module_serialized) == {"shape_assertion": "guaranteed"}


def test_a_bucket_makes_every_shape_static(zoo: Path) -> None:
    lowered = lower_exported(exported(zoo, "attention"), "cpu", {"batch": 2, "seq": 3})
    assert lowered.flat_in_avals == lowered.flat_out_avals == (parse_aval("f32[2,3,8]"),)
    assert "?" not in lowered.as_text()


def test_each_platform_of_a_portable_artifact(zoo: Path) -> None:
    for platform in ("cpu", "cuda", "tpu"):
        lowered = lower_exported(exported(zoo, "mlp"), platform, {"batch": 1})
        assert lowered.platform == platform
        assert "_platform_index" not in lowered.as_text()


@pytest.mark.parametrize("shape", ["4", "n"])
@pytest.mark.parametrize("enable_x64", [False, True], ids=["", "x64"])
def test_the_index_of_a_platform_has_the_type_that_main_takes(enable_x64: bool, shape: str) -> None:
    with jax.enable_x64(enable_x64):
        aval = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jax.numpy.float32)
        function = jax.jit(lambda x: lax.platform_dependent(x, cpu=lax.sin, cuda=lax.tanh, tpu=lax.exp) * x.shape[0])
        artifact = Exported.deserialize(jax.export.export(function, platforms=["tpu", "cuda", "cpu"])(aval).serialize())
    assert f"tensor<{'i64' if enable_x64 else 'i32'}> {{jax.global_constant" in artifact.mlir_module()
    found = {}
    for platform in artifact.platforms:
        text = lower_exported(artifact, platform, {"n": 4} if shape == "n" else {}).as_text()
        found[platform] = [name for name in ("sine", "tanh", "exponential") if f"stablehlo.{name} " in text]
    assert found == {"tpu": ["exponential"], "cuda": ["tanh"], "cpu": ["sine"]}


def test_donated_and_unused_arguments(zoo: Path) -> None:
    assert lower_exported(exported(zoo, "update"), "cpu", {}).donated == (True, True, False)
    named = lower_exported(exported(zoo, "named-square"), "cpu", {})
    assert named.kept_var_idx == (0, 2)
    assert named.donated == (False, False, False)


def test_tokens_of_ordered_effects_are_bound(zoo: Path) -> None:
    artifact = exported(zoo, "effectful")
    assert "tf.aliasing_output = 3" in artifact.mlir_module()  # the result after two tokens and another result
    lowered = lower_exported(artifact, "cpu", {"n": 3})
    assert lowered.donated == (True, False, False)
    main = next(line for line in lowered.as_text().splitlines() if "@main" in line)
    assert "tf.aliasing_output = 1" in main
    assert "token" not in main


def test_calling_conventions_are_those_of_jax(zoo: Path) -> None:
    first, last = CALLING_CONVENTIONS
    assert first == jax.export.minimum_supported_calling_convention_version
    assert last == jax.export.maximum_supported_calling_convention_version
    other = dataclasses.replace(exported(zoo, "loop"), calling_convention_version=last + 1)
    with pytest.raises(CannotLower) as refusal:
        lower_exported(other, "cpu", {})
    assert str(refusal.value) == (
        f"loop has version {last + 1} of the calling convention, this version of stagec knows {first} and {last}"
    )


def test_custom_calls_are_named(zoo: Path) -> None:
    calls = lower_exported(exported(zoo, "factorize"), "cpu", {}).custom_calls
    assert "lapack_spotrf_ffi" in calls


@pytest.mark.parametrize(
    ("platform", "bucket", "text"),
    [
        ("rocm", {"batch": 1}, "mlp was exported for cpu, cuda, tpu, not for rocm"),
        ("cpu", {}, 'mlp: f32[batch,16]: dimension "batch" has no size; the sizes given are: none'),
        (
            "cpu",
            {"batch": 65},
            "mlp: Input shapes do not match the symbolic shape constraint batch <= 64. "
            "Expected '- batch + 64' to be greater or equal to 0, but found -1: batch = 65 (args[1].shape[0] = 65)",
        ),
    ],
)
def test_what_cannot_be_lowered(zoo: Path, platform: str, bucket: dict[str, int], text: str) -> None:
    with pytest.raises(CannotLower) as error:
        lower_exported(exported(zoo, "mlp"), platform, bucket)
    assert str(error.value) == text


def test_sizes_of_dimensions_that_no_argument_has(zoo: Path) -> None:
    """Where Python makes the arguments, the planner doesn't know them: each size would be one more executable."""
    serialized = (zoo.parent / "zoo.mlp.exported").read_bytes()
    bucket = {"batch": 8, "btch": 1, "other": 2}
    with pytest.raises(StagecError) as error:
        compilation.lower(serialized, ExecutableSpec("mlp", "m.toml", CpuTarget("cpu", "AVX2", 1, {}), bucket))
    assert str(error.value) == (
        'm.toml: functions.mlp.buckets.btch: no argument has a dimension "btch"\n'
        '  did you mean "batch"?\n'
        'm.toml: functions.mlp.buckets.other: no argument has a dimension "other"\n'
        "  write one of batch"
    )


def test_an_artifact_of_a_later_stablehlo(zoo: Path) -> None:
    """The build says so before an older jaxlib reads it: of a fleet, the oldest exports."""
    serialized = (zoo.parent / "zoo.mlp.exported").read_bytes()
    later = re.sub(rb"StableHLO_v\d", b"StableHLO_v9", serialized)
    spec = ExecutableSpec("mlp", "m.toml", CpuTarget("cpu", "AVX2", 1, {}), {"batch": 8})
    with pytest.raises(StagecError) as error:
        compilation.lower(later, spec)
    made, here = re.search(rb"StableHLO_v([\d.]+)", later), stablehlo.get_current_version()
    assert made
    assert str(error.value) == (
        f"m.toml: functions.mlp: mlp: it uses StableHLO {made[1].decode()}, and jaxlib {jaxlib.__version__} "
        f"reads {here} and older\n"
        "  let the lock of the build have the oldest jax and jaxlib: newer ones read what it exports"
    )
    compilation.lower(serialized, spec)


def test_a_call_of_a_bundle_says_it_as_well(zoo: Path) -> None:
    with pytest.raises(CallError, match=r"constraint batch <= 64\. .*: batch = 65 \(args\[1\]") as error:
        compile_exported(exported(zoo, "mlp").serialize(), "cpu", ((4,), (16, 4), (65, 16)), devices("cpu"))
    assert error.value.code == "shape"


NOT_MET = "Input shapes do not match the symbolic shape constraint"


@pytest.mark.parametrize(
    ("constraint", "shapes", "function", "text"),
    [
        # What the function does with such sizes ends refinement before the constraint is looked at.
        (
            "a >= 8",
            ("2*a", "b"),
            lambda x, y: lax.dynamic_slice_in_dim(x, 0, 16, 0).sum() + y,
            "a >= 8. Expected 'a - 8' to be greater or equal to 0, but found -4: "
            "a = 4 (args[0]['x'].shape[0] = 8, which is 2*a), b = 6 (args[1].shape[0] = 6)",
        ),
        (
            "a >= b",
            ("a", "b"),
            lambda x, y: x[: y.shape[0]] + y,
            "a >= b. Expected '- b + a' to be greater or equal to 0, but found -2: "
            "a = 4 (args[0]['x'].shape[0] = 4), b = 6 (args[1].shape[0] = 6)",
        ),
    ],
    ids=["a slice", "a sum"],
)
@pytest.mark.parametrize("enable_x64", [False, True], ids=["", "x64"])
def test_the_constraint_that_does_not_hold_is_told(
    constraint: str, shapes: tuple[str, str], function: Any, text: str, enable_x64: bool
) -> None:
    scope = jax.export.SymbolicScope([constraint])
    x, y = (jax.ShapeDtypeStruct(jax.export.symbolic_shape(one, scope=scope), jax.numpy.float32) for one in shapes)
    with jax.enable_x64(enable_x64):
        jitted = jax.jit(lambda tree, y: function(tree["x"], y))
        theirs = jax.export.export(jitted, platforms=["tpu", "cpu"])({"x": x}, y)
        artifact = Exported.deserialize(theirs.serialize())
    arguments = {"x": np.ones(8 if shapes[0] == "2*a" else 4, np.float32)}, np.ones(6, np.float32)
    with pytest.raises(SizesDoNotFit) as error:
        artifact.call(*arguments)
    assert str(error.value) == f"<lambda>: {NOT_MET} {text}"
    with pytest.raises(ValueError, match="Input shapes do not match") as of_jax:
        theirs.call(*arguments)
    assert str(of_jax.value).startswith(f"{NOT_MET} {text.partition(':')[0]}")
