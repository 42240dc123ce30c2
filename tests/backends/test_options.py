"""XLA's options: their names, and what is said of one that XLA does not have."""

import json
from pathlib import Path

from stagec.backends.options import known_options, suggestion
from tests.building import stagec, write_specs

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


def compiled(folder: Path, options: str) -> tuple[int, str]:
    (folder / "f.mlir").write_text(MODULE)
    (folder / "m.toml").write_text(MANIFEST.format(options=options))
    write_specs("m.toml", folder, folder)
    arguments = ("--spec", "m.f.spec", "--output", "m.f.exported", "--import-root", ".")
    assert stagec("export", *arguments, cwd=folder).returncode == 0
    files = ("--exported", "m.f.exported", "--output", "f.xla", "--description", "f.json")
    done = stagec("compile", "--spec", "m.f.cpu.spec", *files, cwd=folder)
    return done.returncode, done.stderr


def test_names_of_options() -> None:
    names = known_options()
    assert {"xla_cpu_enable_fast_math", "xla_gpu_autotune_level", "xla_dump_to"} <= set(names)
    assert len(names) > 200
    assert suggestion("xla_cpu_enable_fast_mth") == "did you mean xla_cpu_enable_fast_math?"
    assert suggestion("zzz") == ""


def test_options_reach_the_executable(tmp_path: Path) -> None:
    assert compiled(tmp_path, "xla_cpu_enable_fast_math = true") == (0, "")
    description = json.loads((tmp_path / "f.json").read_text())
    assert description["target"]["compiler_options"] == {"xla_cpu_enable_fast_math": True}


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
