"""What `stagec diff` tells of two bundles.

Modules: `cli/diff.py`.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stagec.audit import comparison
from tests.building import build, checked, stagec
from tests.bundles import edited_index
from tests.signed import write_bundle_of

SUFFIXES = ".cpu.json", ".cpu.stablehlo.mlirbc", ".cpu.xla", ".exported", ".exported.json"
MODULE = "func.func public @main(%arg0: tensor<{n}xf32>) -> tensor<{n}xf32> {{\n  return %arg0 : tensor<{n}xf32>\n}}\n"
MANIFEST = """
[manifest]
name = "models"
version = "{version}"
[targets.cpu]
platform = "cpu"
isa = "{isa}"
parallelism = 2
[functions.{function}]
entry = "tiny.mlir"
targets = ["cpu"]
[functions.changed]
entry = "{module}.mlir"
targets = ["cpu"]
"""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `first.aot` and `second.aot`."""
    folder = tmp_path_factory.mktemp("comparison")
    for name, version, isa, function, module in (
        ("first", "1", "AVX2", "gone", "small"),
        ("second", "2", "SSE4_2", "new", "large"),
    ):
        root, out = folder / name, folder / f"{name}-out"
        root.mkdir()
        out.mkdir()
        for size, n in (("tiny", 2), ("small", 4), ("large", 8)):
            (root / f"{size}.mlir").write_text(MODULE.format(n=n))
        (root / "models.toml").write_text(MANIFEST.format(version=version, isa=isa, function=function, module=module))
        build("models.toml", out, root).rename(folder / f"{name}.aot")
    return folder


def test_the_same_bundle(bundles: Path) -> None:
    assert checked("diff", "first.aot", "first.aot", cwd=bundles) == "first.aot and first.aot are the same\n"
    report = json.loads(checked("diff", "first.aot", "first.aot", "--json", cwd=bundles))
    assert (report["equal"], report["members"], report["components"]) == (True, [], [])


def test_what_differs_is_told_section_by_section(bundles: Path) -> None:
    done = stagec("diff", "first.aot", "second.aot", cwd=bundles)
    assert (done.returncode, done.stderr) == (1, "")
    content, why = done.stdout.split("made from\n")
    numbers = re.sub(r" bytes: [\d,]+ -> [\d,]+ \([+-][\d.]+%\)", " bytes: # -> #", content)
    assert re.sub(r"[0-9a-f]{12} -> [0-9a-f]{12}", "# -> #", numbers).splitlines() == [
        "bundle",
        "  ~ bundle",
        "      version: 1 -> 2",
        "targets",
        "  ~ cpu",
        "      device_kind: haswell -> nehalem",
        "      requires: (abm, avx, avx2, bmi1, bmi2, cx16, f16c, fma, lahf_lm, movbe, pclmulqdq, popcnt, sse4_1, "
        "sse4_2, ssse3, xsave) -> (cx16, lahf_lm, popcnt, sse4_1, sse4_2, ssse3)",
        "      isa: AVX2 -> SSE4_2",
        "functions",
        "  ~ changed",
        "      in_avals: (f32[4]) -> (f32[8])",
        "      out_avals: (f32[4]) -> (f32[8])",
        "  - gone",
        "  + new",
        "executables",
        "  ~ changed.cpu",
        "      bytes: # -> #",
        "      peak_bytes: 32 -> 64 (+100.0%)",
        "  - gone.cpu",
        "  + new.cpu",
        "members",
        "  ~ changed.cpu.json",
        "      sha256: # -> #",
        "      bytes: # -> #",
        "  ~ changed.cpu.stablehlo.mlirbc",
        "      sha256: # -> #",
        "  ~ changed.cpu.xla",
        "      sha256: # -> #",
        "      bytes: # -> #",
        "  ~ changed.exported",
        "      sha256: # -> #",
        "  ~ changed.exported.json",
        "      sha256: # -> #",
        *(f"  - gone{suffix}" for suffix in SUFFIXES),
        *(f"  + new{suffix}" for suffix in SUFFIXES),
    ]
    assert "  bundle\n    version: 1 -> 2\n" in why
    assert "  changed.cpu\n    source of changed: differs\n    aval args[0]: f32[4] -> f32[8]\n" in why
    assert "gone" not in why


def test_values_are_told_as_a_person_writes_them() -> None:
    def tree(*args: object) -> object:
        return {"tuple": [{"tuple": list(args)}, {"dict": {}}]}

    told = {
        "compiler_options": (
            {"xla_a": True, "xla_b": 1, "xla_c": "x"},
            {"xla_a": False, "xla_b": 1, "xla_d": [1, "y"]},
        ),
        "properties": ({}, {"cores": {"count": 2}}),
        "count": (0, 1234567),
        "nothing": (None, {"a": {"b": True}}),
        "in_tree": (tree({"dict": {"w": "*", "b": "*"}}, "*"), tree({"dict": {"w": "*", "c": "*"}}, "*")),
        "out_tree": ({"tuple": ["*", ["*"]]}, {"tuple": ["*", {"tuple": ["*"]}]}),
    }
    row = {"name": "f", "change": "changed", **{key: {"first": a, "second": b} for key, (a, b) in told.items()}}
    sections = ("bundle", "targets", "executables", "members", "weights", "components")
    empty: dict[str, object] = {key: [] for key in sections}
    assert comparison.as_text({"equal": False, **empty, "functions": [row]}).splitlines() == [
        "functions",
        "  ~ f",
        "      compiler_options.xla_a: true -> false",
        "      compiler_options.xla_c: x -> (none)",
        "      compiler_options.xla_d: (none) -> (1, y)",
        "      properties.cores: (none) -> { count = 2 }",
        "      count: 0 -> 1,234,567",
        "      nothing: (none) -> { a = { b = true } }",
        "      in_tree: - args[0]['b']",
        "      in_tree: + args[0]['c']",
        "      out_tree: result[1]: list of 1 -> tuple of 1",
    ]


@pytest.mark.parametrize("change", ["in_tree", "bind"])
def test_what_another_order_means(zoo: Path, tmp_path: Path, change: str) -> None:
    """Keys of a tree in another order are other arguments; a file that differs anywhere is not the same."""

    def edit(index: dict[str, Any]) -> None:
        function = index["functions"]["mlp"]
        if change == "bind":
            function["padding"] = {"batch": {"fill": 1.0, "mask": ""}}
            return
        params = function["in_tree"]["tuple"][0]["tuple"][0]
        params["dict"] = dict(reversed(params["dict"].items()))

    edited_index(write_bundle_of(zoo, tmp_path, "mlp"), tmp_path / "other.aot", edit)
    told = {
        "in_tree": ["functions", "  ~ mlp", "      in_tree: args[0]: dict of b, w -> dict of w, b"],
        "bind": ["bundle", "  ~ index.json: functions.mlp.padding.batch", "      sha256: # -> #"],
    }[change]
    done = stagec("diff", "zoo.aot", "other.aot", cwd=tmp_path)
    assert (done.returncode, re.sub(r"[0-9a-f]{12}", "#", done.stdout).splitlines()) == (1, told)


def test_what_is_no_bundle(bundles: Path) -> None:
    done = stagec("diff", "first.aot", "first/models.toml", cwd=bundles)
    assert done.returncode == 2
    assert done.stderr.startswith("first/models.toml: not a bundle: ")
    assert done.stderr.endswith("\n  give two bundles (.aot)\n")
