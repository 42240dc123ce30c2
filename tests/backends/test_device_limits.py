"""Metrics and limits for accelerators: collectives of four chips, rooflines, and programs that are too large.

Modules: `backends/analysis.py`, `building/limits.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.backends.deviceless import installed
from tests.building import checked, stagec, write_specs

with_tpu = installed(libtpu="libtpu")
with_cuda = installed(
    jax_cuda13_pjrt="jax_plugins.xla_cuda13",
    jax_cuda13_plugin="jax_cuda13_plugin",
    nvidia_cuda_nvcc="nvidia.cu13.bin",
    nvidia_nvvm="nvidia.cu13.nvvm",
)

MODEL = """
import jax
from jax import lax
from jax.sharding import PartitionSpec as P


def exchange(x):
    def part(x):
        scattered = lax.psum_scatter(x * 3, "d", tiled=True)
        swapped = lax.all_to_all(x * 4, "d", 1, 0, tiled=True)
        moved = lax.ppermute(x, "d", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return lax.psum(x, "d"), lax.all_gather(x * 2, "d", tiled=True), scattered, swapped, moved

    return jax.shard_map(part, in_specs=P("d"), out_specs=(P(), P(), P("d"), P("d"), P("d")), check_vma=False)(x)


def large(params, x):
    return (params["w"] * x + params["b"]).sum(0)


def one(w):
    return w + 1
"""
MANIFEST = """
[manifest]
name = "m"
version = "1"
[meshes.four]
axes = { d = 4 }
[targets.h100x4]
platform = "cuda"
device = "h100-sxm"
topology = "1x1x4"
[functions.exchange]
entry = "exchanging:exchange"
args = ["f32[512,256]"]
mesh = "four"
in_shardings = ["P(d)"]
out_shardings = ["P()", "P()", "P(d)", "P(d)", "P(d)"]
targets = ["v5e:2x2", "h100x4"]
[functions.exchange.limits."v5e:2x2"]
collectives = { all-to-all = 0 }
[functions.large]
entry = "exchanging:large"
args = [{ w = "f32[50000,50000]", b = "f32[50000,50000]" }, "f32[50000,50000]"]
targets = ["v5e:1x1", "a100-80gb", "l4"]
[functions.large.limits.a100-80gb]
peak_memory = "16GiB"
[functions.one]
entry = "exchanging:one"
args = ["f32[40000,200000]"]
targets = ["v5e:1x1"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model, with specs and exports."""
    root = tmp_path_factory.mktemp("device_limits")
    (root / "exchanging.py").write_text(MODEL)
    (root / "m.toml").write_text(MANIFEST)
    for export in write_specs("m.toml", root, root)["exports"]:
        stem = root / export["name"]
        checked("action", "export", "--spec", f"{stem}.spec", "--output", f"{stem}.exported", "--import-root", root)
    return root


def compiled(folder: Path, name: str, output: Path, *, limited: bool = True) -> tuple[int, str]:
    """Compile an executable into `output`; return the exit status and what the command says of it."""
    spec = json.loads((folder / f"{name}.spec").read_text())
    if not limited:
        spec["limits"] = dict.fromkeys(spec["limits"]) | {"key": "", "allow_unknown": False}
    (output.parent / "limited.spec").write_text(json.dumps(spec))
    done = stagec(
        *("action", "compile", "--spec", output.parent / "limited.spec"),
        *("--exported", folder / f"{'.'.join(name.split('.')[:2])}.exported"),
        *("--output", output, "--description", output.with_suffix(".json")),
    )
    # jaxlib tells on stderr which plugin it found, whatever its log level.
    return done.returncode, done.stderr[done.stderr.find("m.toml: ") :] if done.returncode == 2 else done.stderr


def analysis_of(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.with_suffix(".json").read_text())["analysis"]
    return found


@with_tpu
def test_collectives_and_roofline_of_four_chips(folder: Path, tmp_path: Path) -> None:
    assert compiled(folder, "m.exchange.v5e-2x2", tmp_path / "f.xla", limited=False)[0] == 0
    found = analysis_of(tmp_path / "f.xla")
    part = 4 * 128 * 256
    assert found["collectives"] == {
        "all-gather": {"count": 1, "bytes": 4 * part, "sent_bytes": 3 * part},
        "all-reduce": {"count": 1, "bytes": part, "sent_bytes": 2 * part * 3 // 4},
        "all-to-all": {"count": 1, "bytes": part, "sent_bytes": part * 3 // 4},
        "collective-permute": {"count": 1, "bytes": part, "sent_bytes": part},
        "reduce-scatter": {"count": 1, "bytes": part, "sent_bytes": part * 3 // 4},
    }
    assert "unknown" not in found.values()
    assert found["code_bytes"] > 0
    roofline = found["roofline"]
    assert roofline["memory_seconds"] == found["bytes_accessed"] / 819e9
    # By the two links that each of four chips has; of the all-to-all, half of what two of them have goes over two
    # links; and each chip sends its part to a neighbour.
    spread, swapped, moved = (3 + 2 * 3 / 4 + 3 / 4) * part / 100e9, part / 2 / 50e9, part / 50e9
    assert roofline["link_seconds"] == pytest.approx(spread + swapped + moved)
    assert roofline["bound"] == "links"


@with_tpu
def test_a_limit_of_one_kind(folder: Path, tmp_path: Path) -> None:
    status, message = compiled(folder, "m.exchange.v5e-2x2", tmp_path / "f.xla")
    assert status == 2
    head, counts = message.splitlines()
    key = 'functions.exchange.limits."v5e:2x2".collectives.all-to-all'
    assert head == f"m.toml: {key}: exchange for v5e-2x2: all-to-all 1 is over the limit of 0"
    assert "1 all-to-all of 128.0 KiB in all" in counts
    assert not (tmp_path / "f.xla").exists()


@with_cuda
def test_collectives_and_roofline_of_four_devices(folder: Path, tmp_path: Path) -> None:
    assert compiled(folder, "m.exchange.h100x4", tmp_path / "f.xla")[0] == 0
    found = analysis_of(tmp_path / "f.xla")
    part = 4 * 128 * 256
    assert {kind: entry["count"] for kind, entry in found["collectives"].items()} == dict.fromkeys(
        ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"), 1
    )
    assert found["collectives"]["all-gather"]["bytes"] == 4 * part
    assert found["collectives"]["reduce-scatter"]["bytes"] == part
    assert found["code_bytes"] == "unknown"
    sent = sum(moved["sent_bytes"] for moved in found["collectives"].values())
    assert found["roofline"]["link_seconds"] == pytest.approx(sent / 450e9)


@with_cuda
def test_the_memory_of_a_device_is_a_limit(folder: Path, tmp_path: Path) -> None:
    status, message = compiled(folder, "m.large.l4", tmp_path / "f.xla")
    assert status == 2
    head, sums, largest, *rows = message.splitlines()
    what = "peak memory 28.0 GiB is over the 22.5 GiB that one NVIDIA L4 has"
    assert head == f"m.toml: functions.large: large for l4: {what}"
    assert sums.startswith("  arguments 27.9 GiB, temporaries ")
    assert largest == "  largest, on each device:"
    assert [row.split(maxsplit=3)[3] for row in rows if "  argument  " in row] == [
        "params['b'] f32[50000,50000]",
        "params['w'] f32[50000,50000]",
        "x f32[50000,50000]",
    ]
    assert not (tmp_path / "f.xla").exists()


@with_cuda
def test_a_limit_below_the_memory_of_the_device(folder: Path, tmp_path: Path) -> None:
    status, message = compiled(folder, "m.large.a100-80gb", tmp_path / "f.xla")
    assert status == 2
    assert message.startswith(
        "m.toml: functions.large.limits.a100-80gb.peak_memory: large for a100-80gb: peak memory 28.0 GiB is over the "
        "limit of 16.0 GiB\n"
    )
    assert compiled(folder, "m.large.a100-80gb", tmp_path / "f.xla", limited=False)[0] == 0


@with_tpu
def test_the_memory_of_a_chip_is_a_limit(folder: Path, tmp_path: Path) -> None:
    status, message = compiled(folder, "m.large.v5e-1x1", tmp_path / "f.xla")
    assert status == 2
    start = "m.toml: functions.large: large for v5e-1x1: the program does not fit into the device's memory: needs "
    assert message.startswith(start)
    assert "  largest:\n" in message
    for name in ("params['b']", "params['w']", "x"):
        assert f"  9.3 GiB  argument   {name} f32[50000,50000]\n" in message


@with_tpu
def test_one_array_that_is_larger_than_a_chip(folder: Path, tmp_path: Path) -> None:
    status, message = compiled(folder, "m.one.v5e-1x1", tmp_path / "f.xla")
    assert status == 2
    assert message.splitlines()[1:] == ["  largest:", "  29.8 GiB  argument   w f32[40000,200000]"]
