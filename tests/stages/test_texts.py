"""Programs as text, for a reader: StableHLO of one target and bucket, and HLO before and after XLA optimizes it.

Modules: `cli/actions/lower.py`, `cli/actions/optimize.py`, `building/compilation.py`, `stages/mlir.py`.
"""

import dataclasses
from pathlib import Path

import pytest
from jaxlib.mlir import ir

from stagec.core.builds import specs
from stagec.hardware import catalog
from stagec.stages import mlir
from tests.building import checked, stagec

KINDS = ("stablehlo", "hlo-before", "hlo-after")


def texts(zoo: Path, name: str, out: Path, env: dict[str, str] | None = None) -> dict[str, str]:
    """Write all kinds of one of the zoo's executables, and nothing else, into the folder `out`."""
    out.mkdir(exist_ok=True)
    stem = ".".join(name.split(".")[:2])
    given = ("--spec", zoo.parent / f"{name}.spec", "--exported", zoo.parent / f"{stem}.exported")
    for action, kinds in {"lower": KINDS[:2], "optimize": KINDS[2:]}.items():
        options = [part for kind in kinds for part in (f"--{kind}", kind)]
        done = stagec("action", action, *given, *options, cwd=out, env=env)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in out.iterdir()) == sorted(KINDS)
    return {kind: (out / kind).read_text() for kind in KINDS}


def test_texts_are_of_one_bucket_and_hold_no_locations(zoo: Path, tmp_path: Path) -> None:
    found = texts(zoo, "zoo.mlp.cpu.batch4", tmp_path)
    with mlir.make_context():
        assert ir.Module.parse(found["stablehlo"]).operation.verify()
    assert "tensor<4x16xf32>" in found["stablehlo"]
    assert "tensor<?" not in found["stablehlo"]
    assert "ENTRY" in found["hlo-before"]
    assert "f32[4,16]" in found["hlo-before"]
    assert "is_scheduled=true" in found["hlo-after"]
    assert "is_scheduled=true" not in found["hlo-before"]
    for text in found.values():
        assert "loc(" not in text
        assert ".py" not in text


def test_texts_of_a_program_for_several_devices(zoo: Path, tmp_path: Path) -> None:
    found = texts(zoo, "zoo.sharded.cpu.batch4", tmp_path)
    assert '"data"=2, "model"=2' in found["stablehlo"]
    assert 'sharding="#sdy.sharding' in found["hlo-before"]
    # On one of the devices: two of four rows, and half of the six columns.
    assert "f32[2,3]" not in found["hlo-before"]
    assert "num_partitions=4" in found["hlo-after"]


def test_another_process_writes_the_same_texts(zoo: Path, tmp_path: Path) -> None:
    env = {"PYTHONHASHSEED": "7", "HOME": str(tmp_path), "TZ": "Asia/Tokyo"}
    first = texts(zoo, "zoo.sharded.cpu.batch4", tmp_path / "a")
    assert texts(zoo, "zoo.sharded.cpu.batch4", tmp_path / "b", env) == first


@pytest.mark.parametrize("target", ["v5e:1x1", "h200"])
def test_lowering_for_other_hardware_takes_no_plugin(zoo: Path, tmp_path: Path, target: str) -> None:
    spec = specs.executable_spec((zoo.parent / "zoo.mlp.cpu.batch4.spec").read_text())
    (tmp_path / "spec").write_text(specs.to_json(dataclasses.replace(spec, target=catalog.target(target))))
    checked(
        *("action", "lower", "--spec", tmp_path / "spec", "--exported", zoo.parent / "zoo.mlp.exported"),
        *("--stablehlo", tmp_path / "stablehlo", "--hlo-before", tmp_path / "hlo"),
    )
    assert "tensor<4x16xf32>" in (tmp_path / "stablehlo").read_text()
    assert "f32[4,16]" in (tmp_path / "hlo").read_text()


def test_a_program_over_a_limit_is_written_all_the_same(zoo: Path, tmp_path: Path) -> None:
    spec = specs.executable_spec((zoo.parent / "zoo.mlp.cpu.batch4.spec").read_text())
    limited = dataclasses.replace(spec, limits=specs.Limits(key="functions.mlp.limits.cpu", executable_size=1))
    (tmp_path / "spec").write_text(specs.to_json(limited))
    given = ("--spec", tmp_path / "spec", "--exported", zoo.parent / "zoo.mlp.exported", "--label", "//zoo:zoo.mlp.cpu")
    checked("action", "optimize", *given, "--hlo-after", tmp_path / "hlo")
    done = stagec("action", "compile", *given, "--output", tmp_path / "xla")
    assert done.returncode == 2
    assert done.stderr.startswith("//zoo:zoo.mlp.cpu: size of the executable ")
    assert done.stderr.endswith(
        " is over the limit of 1 bytes (tests/zoo/zoo.toml: functions.mlp.limits.cpu.executable_size)\n"
    )
    assert not (tmp_path / "xla").exists()
    assert "is_scheduled=true" in (tmp_path / "hlo").read_text()
