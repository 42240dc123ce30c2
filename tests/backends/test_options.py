"""XLA's options: their names, and what is said of one that XLA does not have.

Modules: `core/builds/compiler_options.py`, `patches/descriptors.py`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax._src.compiler
import jax._src.config
import numpy as np
import pytest
from jaxlib import xla_client

import stagec
from stagec.backends import compilation
from stagec.backends.options import known_options, suggestion
from stagec.core.builds import compiler_options as options
from tests.building import stagec as run_stagec, write_specs

MANIFEST = """
[manifest]
name = "m"
version = "1"
[targets.cpu]
platform = "cpu"
isa = "AVX2"
compiler_options = {{ {options} }}
[functions.f]
entry = "f.mlir"
targets = ["cpu"]
"""
MODULE = "module { func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> { return %a : tensor<2xf32> } }"


BUILD_OPTIONS = {
    "exec_time_optimization_effort": -0.5,
    "memory_fitting_effort": 1,
    "optimization_level": 19,
    "memory_fitting_level": 39,
    "fdo_profile": b'costs { name: "dot" cost_us: 2 }',
}


def compiled(folder: Path, written: str) -> tuple[int, str]:
    (folder / "f.mlir").write_text(MODULE)
    (folder / "m.toml").write_text(MANIFEST.format(options=written))
    write_specs("m.toml", folder, folder)
    arguments = ("--spec", "m.f.spec", "--output", "m.f.exported", "--import-root", ".")
    assert run_stagec("action", "export", *arguments, cwd=folder).returncode == 0
    files = ("--exported", "m.f.exported", "--output", "f.xla", "--description", "f.json")
    done = run_stagec("action", "compile", "--spec", "m.f.cpu.spec", *files, cwd=folder)
    return done.returncode, done.stderr


def test_names_of_options() -> None:
    names = known_options()
    assert {"xla_cpu_enable_fast_math", "xla_gpu_autotune_level", "xla_dump_to"} <= set(names)
    assert len(names) > 200
    assert suggestion("xla_cpu_enable_fast_mth") == "did you mean xla_cpu_enable_fast_math?"
    assert suggestion("optimisation_level") == "did you mean optimization_level?"
    assert suggestion("zzz") == ""


def test_fields_are_set_as_in_jax() -> None:
    assert BUILD_OPTIONS.keys() == options.BUILD_OPTIONS.keys()
    ours = xla_client.CompileOptions()
    given = {name: value for name, value in BUILD_OPTIONS.items() if hasattr(ours.executable_build_options, name)}
    compilation.set_options(ours, {"xla_cpu_prefer_vector_width": 128, **given})
    profile = given.pop("fdo_profile")
    given["xla_cpu_prefer_vector_width"] = 128
    theirs = jax._src.compiler.get_compile_options(1, 1, env_options_overrides=given, fdo_profile=profile)  # type: ignore[arg-type]
    for name in BUILD_OPTIONS:
        found, expected = (getattr(one.executable_build_options, name, None) for one in (ours, theirs))
        assert found == expected, name
    assert ours.env_option_overrides == theirs.env_option_overrides == [("xla_cpu_prefer_vector_width", 128)]
    for name in BUILD_OPTIONS.keys() - given.keys() - {"fdo_profile"}:  # JAX 0.12 has no efforts
        with pytest.raises(stagec.CannotCompile, match=f"this jaxlib's XLA has no option {name}"):
            compilation.set_options(ours, {name: BUILD_OPTIONS[name]})


@pytest.mark.parametrize(
    ("name", "value", "what", "write"),
    [
        ("optimization_level", "O4", '"O4"', 'write one of "UNKNOWN" (0), "O0" (9), "O1" (19), "O2" (29), "O3" (39)'),
        ("memory_fitting_level", 1, "1", 'write one of "UNKNOWN" (0), "O0" (9)'),
        ("optimization_level", True, "True", 'write one of "UNKNOWN" (0)'),
        ("memory_fitting_effort", 1.5, "1.5", "write a number from -1.0 (least) to 1.0 (most effort)"),
        ("exec_time_optimization_effort", "high", '"high"', "write a number from -1.0 (least)"),
        ("fdo_profile", 3, "3", "write a ProfiledInstructionsProto, as bytes or in protobuf's text format"),
        ("xla_cpu_enable_fast_math", None, "None", "write a number, a string or a boolean"),
        ("xla_disable_hlo_passes", ["fusion"], "['fusion']", "write a number, a string or a boolean"),
        (3, 4, "3", "write a string"),
    ],
)
def test_values_that_an_option_cannot_have(name: Any, value: object, what: str, write: str) -> None:
    key = name if isinstance(name, str) else "the name of an option"
    with pytest.raises(stagec.CannotCompile) as error:
        compilation.checked({name: value})
    assert str(error.value) == f"{key} cannot be {what}"
    assert error.value.key == f"compiler_options.{key}"
    assert error.value.write.startswith(write)
    assert error.value.__notes__ == [error.value.write]  # what a traceback shows


def test_levels_are_written_in_three_ways() -> None:
    places: tuple[tuple[Any, str], ...] = ((jax._src.config, "EffortLevel"), (jax._src.compiler, "CompilerEffortLevel"))
    of_jax = next(getattr(module, name) for module, name in places if hasattr(module, name))
    found = []
    for level in ("O1", 19, of_jax.O1):
        settings = xla_client.CompileOptions()
        compilation.set_options(settings, {"optimization_level": level})
        found.append(settings.executable_build_options.optimization_level)
    assert found == [19, 19, 19]
    compiled = stagec.jit(lambda x: x * 2).lower(np.ones(3, np.float32)).compile({"optimization_level": of_jax.O1})
    assert compiled.description.target.compiler_options == {"optimization_level": "O1"}
    assert stagec.Compiled.deserialize(compiled.serialize()).description == compiled.description


def test_a_profile_is_told_by_its_digest() -> None:
    wrapped = stagec.jit(lambda x: x * 2, compiler_options={"fdo_profile": b"\0", "memory_fitting_level": "O0"})
    compiled = wrapped.lower(np.ones(3, np.float32)).compile({"memory_fitting_level": "O3"})
    told = {"fdo_profile": hashlib.sha256(b"\0").hexdigest(), "memory_fitting_level": "O3"}
    assert compiled.description.target.compiler_options == told
    np.testing.assert_array_equal(wrapped(np.ones(3, np.float32)), np.full(3, 2, np.float32))


def test_values_are_checked_when_a_manifest_is_planned(tmp_path: Path) -> None:
    written = 'optimization_level = "O4", memory_fitting_effort = 2.0, xla_no_such = 1'
    (tmp_path / "m.toml").write_text(MANIFEST.format(options=written))
    done = run_stagec("action", "plan", "m.toml", "--output", "plan.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        'm.toml: targets.cpu.compiler_options.optimization_level: optimization_level cannot be "O4"\n'
        '  write one of "UNKNOWN" (0), "O0" (9), "O1" (19), "O2" (29), "O3" (39)\n'
        "m.toml: targets.cpu.compiler_options.memory_fitting_effort: memory_fitting_effort cannot be 2.0\n"
        "  write a number from -1.0 (least) to 1.0 (most effort)\n",
    )


def test_options_reach_the_executable(tmp_path: Path) -> None:
    assert compiled(tmp_path, "xla_cpu_enable_fast_math = true") == (0, "")
    without = (tmp_path / "f.xla").read_bytes()
    assert compiled(tmp_path, 'xla_cpu_enable_fast_math = true, optimization_level = "O1"') == (0, "")
    assert (tmp_path / "f.xla").read_bytes() != without
    description = json.loads((tmp_path / "f.json").read_text())
    told = {"optimization_level": "O1", "xla_cpu_enable_fast_math": True}
    assert description["target"]["compiler_options"] == told


def test_an_option_that_xla_does_not_have(tmp_path: Path) -> None:
    assert compiled(tmp_path, "xla_cpu_enable_fast_mth = true") == (
        2,
        "m.toml: targets.cpu.compiler_options.xla_cpu_enable_fast_mth: this jaxlib's XLA has no option "
        "xla_cpu_enable_fast_mth\n  did you mean xla_cpu_enable_fast_math?\n",
    )


def test_a_value_of_another_type(tmp_path: Path) -> None:
    status, stderr = compiled(tmp_path, "xla_cpu_enable_fast_math = 3")
    assert status == 2
    assert stderr.startswith("m.toml: targets.cpu.compiler_options.xla_cpu_enable_fast_math: XLA refuses the option: ")
    assert "'3' is not a valid bool value" in stderr
