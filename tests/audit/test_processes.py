"""Which process has which part of arrays, beside JAX's shardings over libtpu's own topologies."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from stagec.audit.processes import as_lines, processes
from stagec.core.messages.errors import StagecError
from stagec.hardware import tpu as tpus
from stagec.hardware.tpu_topologies import parse_topology
from tests.backends.deviceless import installed, run
from tests.building import build, checked

CASES: list[tuple[str, str, int, dict[str, int]]] = [
    ("v5e:4x4", "", 1, {"data": 4, "model": 4}),
    ("v5e:4x4", "4x2", 1, {"data": 2, "model": 8}),
    ("v5e:2x4", "", 2, {"data": 4, "model": 4}),
    ("v6e:4x8", "", 1, {"data": 32, "model": 1}),
    ("v5p:2x2x4", "1x2x2", 1, {"data": 4, "model": 4}),
    ("v4:2x2x4", "", 1, {"data": 2, "model": 8}),
    ("v2:4x4", "", 1, {"data": 4, "model": 8}),
    ("tpu7x:2x2x2", "", 1, {"data": 4, "model": 4}),
    ("v5p:4x4x8_twisted", "", 1, {"data": 16, "model": 8}),
]
SPECS: list[list[list[str]]] = [
    [[], []],
    [["data"], []],
    [["data"], ["model"]],
    [[], ["model", "data"]],
    [["model"], []],
]


def description(topology: str, host: str, slices: int, mesh: dict[str, int], devices: list[Any]) -> dict[str, Any]:
    """The fields that are read. devices: of each partition the id, and the coordinates."""
    arrays = [
        {"path": f"args[{i}]", "shape": [256, 256], "shard_shape": [0, 0], "sharding": split}
        for i, split in enumerate(SPECS)
    ]
    return {
        "target": {"platform": "tpu", "topology": topology, "chips_per_host": host, "slices": slices},
        "device_assignment": {
            "axis_names": list(mesh),
            "axis_sizes": list(mesh.values()),
            "device_ids": [number for number, _ in devices],
            "coords": [",".join(map(str, coords)) for _, coords in devices],
        },
        "abi": {"parameters": arrays, "results": []},
    }


def square(mesh: dict[str, int] | None = None) -> dict[str, Any]:
    """Of v5e:4x4, with devices row by row."""
    devices = [[4 * y + x, [x, y, 0, 0]] for y, x in itertools.product(range(4), repeat=2)]
    return description("v5e:4x4", "", 1, mesh or {"data": 4, "model": 4}, devices)


_BY_JAX = """
import json, sys
from stagec.backends import plugins
from stagec.backends.tpu import compiler as tpu, mesh as tpu_mesh
from stagec.hardware import catalog, tpu as tpus
from stagec.hardware.tpu_topologies import parse_topology
tpu.prepare_process(catalog.target("v5e:2x2"))
plugins.load(tpu.PLUGIN)
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
cases, specs = json.loads(sys.argv[1])
told = []
for text, host, slices, sizes in cases:
    topology = parse_topology(text, tpus.generations(), host, slices)
    devices = topologies.get_topology_desc(str(topology), "tpu", **topology.options()).devices
    shape = tuple(sizes.values())
    ordered = [devices[i] for i in tpu_mesh.order(devices, shape)]
    mesh = Mesh(np.array(ordered).reshape(shape), tuple(sizes))
    held = []
    for spec in specs:
        map_ = NamedSharding(mesh, PartitionSpec(*map(tuple, spec))).devices_indices_map((256, 256))
        parts = {(d.process_index, *(n for s in index for n in s.indices(256)[:2])) for d, index in map_.items()}
        held.append(sorted(parts))
    told.append([[[d.id, [*d.coords, d.core_on_chip]] for d in ordered], [d.process_index for d in ordered], held])
print(json.dumps(told))
"""


@installed(libtpu="libtpu")
def test_processes_are_those_of_libtpu_and_their_parts_those_of_jax(tmp_path: Path) -> None:
    done = run(_BY_JAX, json.dumps([CASES, SPECS]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for (topology, host, slices, mesh), (devices, indices, held) in zip(CASES, told, strict=True):
        report = processes(description(topology, host, slices, mesh, devices))
        assert report is not None
        by_process: list[list[int]] = [[] for _ in range(max(indices) + 1)]
        for (number, _), process in zip(devices, indices, strict=True):
            by_process[process].append(number)
        assert report["device_ids"] == by_process, topology
        for array, parts in zip(report["parameters"], held, strict=True):
            mine = sorted(
                [p, *part["ranges"][0], *part["ranges"][1]] for part in array["parts"] for p in part["processes"]
            )
            assert mine == parts, (topology, array["path"])


@pytest.mark.parametrize(("topology", "host", "slices", "mesh"), CASES)
def test_each_host_has_as_many_chips(topology: str, host: str, slices: int, mesh: dict[str, int]) -> None:
    of = parse_topology(topology, tpus.generations(), host, slices)
    chips = [
        of.host_of(coords, number)
        for number in range(slices)
        for coords in itertools.product(*map(range, (*of.shape, 1)[:3]))
    ]
    assert {chips.count(number) for number in range(of.num_hosts)} == {len(chips) // of.num_hosts}


def test_what_a_person_reads() -> None:
    report = processes(square())
    assert report is not None
    assert as_lines(report)[:2] == [
        "processes  4, one on each host of 2x2x1 chips",
        "  process 0, devices 0, 1, 4, 5: args[0] whole; args[1][0:128, :]; args[2][0:128, 0:128]; "
        "args[3][:, 0:32+64:96]; ... and 1 more -> nothing",
    ]
    assert len(as_lines(report)) == 5
    assert report["parameters"][1]["parts"][3] == {"ranges": [[192, 256], [0, 256]], "processes": [2, 3]}


def test_parts_that_are_no_box() -> None:
    """Devices in an order in which a process has two squares across from each other."""
    given = square()
    assigned = given["device_assignment"]
    order = [0, 2, 3, 6, 7, 1, 8, 9, *range(10, 14), 4, 5, 14, 15]
    for key in ("device_ids", "coords"):
        assigned[key] = [assigned[key][i] for i in order]
    report = processes(given)
    assert report is not None
    assert "args[2][0:64, 0:64] and args[2][64:128, 64:128] and " in as_lines(report)[1]


def test_a_sharding_that_has_no_names() -> None:
    given = square()
    given["abi"] = {
        "parameters": [{"path": "args[0]", "shape": [8, 8], "shard_shape": [2, 8], "sharding": None}],
        "results": [{"path": "result", "shape": [8], "shard_shape": [8], "sharding": None}],
    }
    report = processes(given)
    assert report is not None
    line = "  process 0, devices 0, 1, 4, 5: args[0]: a part that has no names of axes -> result whole"
    assert as_lines(report)[1] == line


def test_many_processes() -> None:
    devices = [[16 * y + x, [x, y, 0, 0]] for y, x in itertools.product(range(16), repeat=2)]
    report = processes(description("v5e:16x16", "", 1, {"data": 16, "model": 16}, devices))
    assert report is not None
    assert len(report["device_ids"]) == 64
    assert as_lines(report)[-1] == "  ... and 48 more, which --json shows"
    assert len(as_lines(report)) == 18


def test_one_host_and_other_platforms_have_none() -> None:
    given = square()
    assert processes({**given, "target": {**given["target"], "chips_per_host": "4x4"}}) is None
    assert processes({**given, "target": {"platform": "cpu"}}) is None
    assert processes({**given, "device_assignment": None}) is None


def test_a_description_that_contradicts_itself() -> None:
    with pytest.raises(ValueError, match="16 devices are assigned to the mesh"):
        processes(square({"data": 2, "model": 4}))
    given = square()
    given["abi"]["parameters"][1]["sharding"] = [["other"], []]
    with pytest.raises(ValueError, match=r"args\[1\] is split over"):
        processes(given)
    given = square()
    given["target"]["topology"] = "v9:4x4"
    with pytest.raises(StagecError, match="there is no TPU generation v9"):
        processes(given)


MODEL = """
import jax
import jax.numpy as jnp


def step(w, x, y):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    return w - 0.1 * gradient, loss
"""
MANIFEST = """
[manifest]
name = "spread"
version = "0"

[targets.slice]
platform = "tpu"
topology = "v5e:4x4"

[meshes.grid]
axes = { data = 4, model = 4 }

[functions.step]
entry = "spread:step"
args = ["f32[64,8]", "f32[32,64]", "f32[32,8]"]
targets = ["slice"]
mesh = "grid"
in_shardings = ["P(None, model)", "P(data)", "P(data, model)"]
out_shardings = ["P(None, model)", "P()"]
"""


@installed(libtpu="libtpu")
def test_inspect_tells_them_of_a_bundle_and_of_an_executable(tmp_path: Path) -> None:
    (tmp_path / "spread.py").write_text(MODEL)
    (tmp_path / "spread.toml").write_text(MANIFEST)
    bundle = build("spread.toml", tmp_path, tmp_path)
    line = (
        "process 1, devices 2, 3, 6, 7: args[0][:, 4:8]; args[1][0:16, :]; args[2][0:16, 4:8] -> "
        "result[0][:, 4:8]; result[1] whole"
    )
    for file in (bundle, tmp_path / "spread.step.slice.json"):
        assert [told.strip() for told in checked("inspect", file).splitlines()].count(line) == 1
        report = json.loads(checked("inspect", "--json", file))
        told = report["functions"]["step"]["executables"][0] if file == bundle else report
        assert told["processes"]["device_ids"] == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
        assert told["processes"]["results"][1] == {
            "path": "result[1]",
            "shape": [],
            "parts": [{"ranges": [], "processes": [0, 1, 2, 3]}],
        }
