"""Hardware by its properties: what is checked in, topologies of TPUs, descriptions of GPUs, and the list.

Modules: `hardware/catalog.py`, `hardware/cpu.py`, `hardware/cuda.py`, `hardware/gpu_devices.py`,
`hardware/rocm.py`, `hardware/listing.py`, `hardware/tables.py`, `hardware/tpu.py`, `hardware/tpu_topologies.py`,
`cli/targets.py`.
"""

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from stagec.core.builds.platforms import PLATFORMS
from stagec.core.builds.specs import Aarch64Target, CpuTarget, GpuTarget, TpuTarget, to_json
from stagec.core.messages.errors import StagecError
from stagec.hardware import aarch64, catalog, cpu as cpus, cuda as gpus, gpu_devices, rocm, tables, tpu as tpus
from stagec.hardware.gpu_devices import NvidiaDevice
from stagec.hardware.tpu_topologies import Generation, parse_topology, topologies
from stagec.manifest.cpu import Core, Isa
from stagec.manifest.tables import NAME
from tests.building import COMPILER, checked

FILES = sorted((COMPILER / "stagec" / "targets").iterdir())


def test_the_checked_in_files_are_those_that_are_read() -> None:
    assert [file.name for file in FILES] == sorted(platform.catalog for platform in PLATFORMS.values())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_target_has_a_line_and_a_source(file: Path) -> None:
    for name, table in tomllib.loads(file.read_text("utf-8")).items():
        assert re.match(NAME, name)
        assert table["doc"], name
        assert "\n" not in table["doc"]
        assert table["source"], name


def test_there_is_a_short_name_for_every_instruction_set() -> None:
    rows = tables.read("cpu").values()
    assert [row["isa"] for row in rows if "isa" in row] == list(get_args(Isa))
    assert [row["core"] for row in rows if "core" in row] == list(get_args(Core)) == list(aarch64.CORES)


def test_a_generation_has_the_fields_of_one() -> None:
    for generation in tpus.generations().values():
        for field in dataclasses.fields(Generation):
            value = getattr(generation, field.name)
            if field.name == "pod":
                assert all(type(size) is int and size > 0 for size in value)
            else:
                assert type(value).__name__ == field.type, (generation.name, field.name)


def test_what_the_checked_in_targets_are() -> None:
    assert catalog.target("cpu-avx512") == CpuTarget("cpu-avx512", "AVX512", 8, {})
    assert catalog.target("neoverse-n1") == Aarch64Target("neoverse-n1", "neoverse-n1", 8, {})
    h200 = catalog.target("h200")
    assert isinstance(h200, GpuTarget)
    assert (h200.name, h200.device, h200.topology, h200.compiler_options) == ("h200", "h200", "1x1x1", {})
    assert h200.figures["device_memory_size"] == 150109880320
    assert h200.figures["threads_per_warp"] == 32
    assert catalog.target("v5e:2x2") == TpuTarget(
        name="v5e-2x2",
        topology="v5e:2x2",
        chips_per_host="",
        slices=1,
        figures={
            "name": "v5e",
            "device_kind": "TPU v5 lite",
            "cores": 1,
            "pod": [16, 16],
            "memory": 16 << 30,
            "bandwidth": 819e9,
            "flops": 197e12,
            "link_bandwidth": 50e9,
            "network_bandwidth": 3.125e9,
        },
        compiler_options={},
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", 'unknown target "h100"\n  did you mean "h100-pcie" or "h100-sxm"?'),
        ("A100-40", 'unknown target "A100-40"\n  did you mean "a100-40gb"?'),
        ("cpu-avx3", 'unknown target "cpu-avx3"\n  did you mean "cpu-avx", "cpu-avx2" or "cpu-amx"?'),
        (
            "v5e",
            'unknown target "v5e"\n  write the chips of the slice too, for example v5e:1x1, v5e:2x2 or v5e:2x4',
        ),
        (
            "tp_2",
            'unknown target "tp_2"\n  write a short name that stagec targets lists, or a TPU topology such as v5e:2x2',
        ),
        (
            "v6e:5x5",
            "topology: v6e:5x5: a slice consists of whole hosts, and a host has 2x2 chips\n"
            "  write for example v6e:2x16, v6e:4x8 or v6e:2x8",
        ),
    ],
)
def test_a_name_of_no_target(name: str, message: str) -> None:
    with pytest.raises(StagecError) as caught:
        catalog.target(name)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "name", "devices"),
    [
        ("v5e:2x4", "v5e:2x4", 8),
        ("V5E:2x4x1", "v5e:2x4", 8),
        ("v5 lite:2x4", "v5e:2x4", 8),
        ("TPU v6 lite:2x2", "v6e:2x2", 4),
        ("v5p:2x2", "v5p:2x2x1", 4),
        ("v5:4x4x4", "v5p:4x4x4", 64),
        ("v4:16x16x16", "v4:16x16x16", 4096),
        ("tpu7x:16x16x36", "tpu7x:16x16x36", 18432),
        ("v3:2x2", "v3:2x2", 8),
        ("v6e:1x1", "v6e:1x1", 1),
        ("v6e=2x2", "v6e:2x2", 4),
        ("v6e_2x2", "v6e:2x2", 4),
        ("v5p:4x4x8_twisted", "v5p:4x4x8_twisted", 128),
        ("TPU v4_8x4x4_twisted", "v4:8x4x4_twisted", 128),
        ("tpu7x=4x8x12_twisted", "tpu7x:4x8x12_twisted", 768),
        ("v6e:4x4_untwisted", "v6e:4x4", 16),
    ],
)
def test_a_topology_is_read(text: str, name: str, devices: int) -> None:
    topology = parse_topology(text, tpus.generations())
    assert (str(topology), topology.num_devices) == (name, devices)


@pytest.mark.parametrize(
    ("text", "wraps"),
    [
        ("v5p:4x4x8", (True, True, True)),
        ("v4:8x12x16", (True, True, True)),
        ("v5p:4x4x2", (False, False, False)),
        ("v5p:2x2x1", (False, False, False)),
        ("v5e:16x16", (True, True)),
        ("v6e:8x16", (False, True)),
        ("v6e:8x8", (False, False)),
        ("v3:16x32", (False, True)),
    ],
)
def test_where_links_go_around(text: str, wraps: tuple[bool, ...]) -> None:
    assert parse_topology(text, tpus.generations()).wraps == wraps


@pytest.mark.parametrize(
    ("text", "what", "write"),
    [
        (
            "v7x:2x2x1",
            "there is no TPU generation v7x; libtpu knows v2, v3, v4, v5e, v5p, v6e, tpu7x",
            'did you mean "tpu7x"?',
        ),
        (
            "v5litepod:4x4",
            "there is no TPU generation v5litepod; libtpu knows v2, v3, v4, v5e, v5p, v6e, tpu7x",
            'did you mean "v5e"?',
        ),
        (
            "v5litepod-4",
            '"v5litepod-4" is not a TPU topology',
            "write a generation and the chips along each axis, for example v5e:2x2 or v5p:2x2x1",
        ),
        (
            "v5e:3x3",
            "v5e:3x3: a slice consists of whole hosts, and a host has 2x2 chips",
            "write for example v5e:2x4, v5e:2x8 or v5e:4x4",
        ),
        (
            "v5e:2x2x2",
            "v5e:2x2x2: a v5e slice has 2 axes, not 3",
            "write for example v5e:2x4, v5e:2x2 or v5e:2x8",
        ),
        *(
            (
                text,
                f"{text}: libtpu twists a torus of three axes, multiples of the shortest, "
                "of which one is twice as long",
                "write for example v5p:4x4x8_twisted or v5p:4x8x8_twisted, or leave out _twisted",
            )
            for text in ("v6e:4x8_twisted", "v5p:4x4x4_twisted", "v5p:2x2x1_twisted", "v4:8x12x16_twisted")
        ),
        (
            "v5p:4x4x8_Twisted",
            '"v5p:4x4x8_Twisted" is not a TPU topology',
            "write a generation and the chips along each axis, for example v5e:2x2 or v5p:2x2x1",
        ),
        (
            "v6e:16x32",
            "v6e:16x32: a v6e pod has 16x16 chips",
            "write for example v6e:16x16, v6e:8x16 or v6e:4x16",
        ),
    ],
)
def test_a_topology_that_does_not_exist(text: str, what: str, write: str) -> None:
    with pytest.raises(StagecError) as caught:
        parse_topology(text, tpus.generations())
    (problem,) = caught.value.problems
    assert (problem.what, problem.key, problem.write) == (what, "topology", write)


def test_a_twisted_torus_is_a_target_by_any_of_its_names() -> None:
    names = ("v5p:4x4x8_twisted", "v5p_4x4x8_twisted")
    assert [catalog.target(name).name for name in names] == ["v5p-4x4x8_twisted"] * 2
    assert catalog.target("v5p:4x4x8_untwisted") == catalog.target("v5p:4x4x8")


def test_a_host_that_does_not_divide_the_slice() -> None:
    with pytest.raises(StagecError) as caught:
        parse_topology("v6e:4x2", tpus.generations(), host="2x4")
    (problem,) = caught.value.problems
    assert problem.key == "chips_per_host"
    assert problem.what == "v6e:4x2: a slice consists of whole hosts, and a host has 2x4 chips"


@pytest.mark.parametrize("generation", tpus.generations())
def test_every_usual_topology_is_one(generation: str) -> None:
    usual = topologies(tpus.generations()[generation])
    assert [str(parse_topology(text, tpus.generations())) for text in usual] == usual


@pytest.mark.parametrize("text", ["8", "1x8", "0x1x1", "1x1x1x1", "1x1x-1", "axbxc"])
def test_a_topology_that_is_none(text: str) -> None:
    with pytest.raises(StagecError) as caught:
        gpu_devices.num_devices(text)
    (problem,) = caught.value.problems
    assert (problem.key, problem.what) == ("topology", f'"{text}" is not a topology of GPUs')
    assert problem.write == "write partitions x hosts x devices of each host, for example 1x1x1 or 1x2x8"


def test_the_devices_of_a_topology_are_counted() -> None:
    assert [gpu_devices.num_devices(text) for text in ("1x1x1", "1x1x8", "2x4x8")] == [1, 8, 64]


def test_an_unknown_device() -> None:
    another = "\nfor another one, write the path of a file that describes it, as stagec describe-device writes it"
    for name, write in {
        "h100": 'did you mean "h100-pcie" or "h100-sxm"?',
        "b20": 'did you mean "b200"?',
        "mine": f"write one of {', '.join(gpus.devices())}",
    }.items():
        with pytest.raises(StagecError) as caught:
            gpus.device(name)
        (problem,) = caught.value.problems
        assert (problem.key, problem.what, problem.write) == ("device", f'unknown device "{name}"', write + another)


H200 = dataclasses.asdict(gpus.device("h200"))


def test_a_description_is_read_back() -> None:
    assert gpu_devices.read("cuda", H200) == gpus.device("h200")


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(NvidiaDevice) if field.default is dataclasses.MISSING]
)
def test_a_description_that_lacks_a_field(field: str) -> None:
    with pytest.raises(StagecError) as caught:
        gpu_devices.read("cuda", {key: value for key, value in H200.items() if key != field}, "mine.toml")
    (problem,) = caught.value.problems
    assert (problem.file, problem.key) == ("mine.toml", field)
    assert problem.what == "missing key: without it XLA stops, or makes code for another device"


def test_all_that_is_wrong_with_a_description_is_told() -> None:
    description: dict[str, Any] = {key: value for key, value in H200.items() if key not in ("bf16_flops", "name")}
    description |= {
        "doc": 1,
        "core_cuont": 1,
        "core_count": "132",
        "l2_cache_size": True,
        "device_memory_size": 1.5,
        "threads_per_warp": 0,
        "clock_rate_ghz": float("nan"),
        "compute_capability": "sm_90",
    }
    with pytest.raises(StagecError) as caught:
        gpu_devices.read("cuda", description, "mine.toml")
    assert str(caught.value).splitlines() == [
        "mine.toml: name: missing key: without it XLA stops, or makes code for another device",
        "mine.toml: bf16_flops: missing key: without it XLA stops, or makes code for another device",
        "  write the peak of dense bfloat16 operations a second, from the device's data sheet",
        'mine.toml: compute_capability: "sm_90" is not a compute capability',
        '  write for example "8.9", or "9.0a" for all of an H100',
        'mine.toml: core_count: "132" is not an integer',
        "mine.toml: clock_rate_ghz: nan is not positive",
        "mine.toml: device_memory_size: 1.5 is not an integer",
        "mine.toml: l2_cache_size: true is not an integer",
        "mine.toml: threads_per_warp: 0 is not positive",
        "mine.toml: doc: 1 is not a string",
        "mine.toml: core_cuont: unknown key",
        '  did you mean "core_count"?',
    ]


def test_a_device_without_nvlink_and_a_clock_in_whole_gigahertz() -> None:
    device = gpu_devices.read("cuda", {**H200, "active_links": 0, "nvlink_bandwidth": 0, "clock_rate_ghz": 2})
    assert (device.active_links, device.nvlink_bandwidth, device.clock_rate_ghz) == (0, 0, 2)


@pytest.mark.parametrize(
    ("name", "flops"),
    [("mi210", 45.3e12), ("mi250x", 47.9e12), ("mi300x", 163.4e12), ("rx7900xtx", 61.4e12), ("rx9070", 36.1e12)],
)
def test_the_peak_of_float32_is_the_one_of_the_data_sheet(name: str, flops: float) -> None:
    assert rocm.device(name).f32_flops == pytest.approx(flops, rel=0.002)


def test_equal_devices_have_equal_figures_however_numbers_are_written() -> None:
    first, second = (gpu_devices.read("cuda", {**H200, "clock_rate_ghz": clock}) for clock in (2, 2.0))
    assert to_json(first) == to_json(second)


def test_the_listing_has_everything_with_its_properties() -> None:
    told = json.loads(checked("targets", "--json"))["targets"]
    assert [entry["name"] for entry in told] == [
        *cpus.HARDWARE.names(),
        *gpus.devices(),
        *rocm.devices(),
        *tpus.generations(),
    ]
    (h200,) = (entry for entry in told if entry["name"] == "h200")
    assert (h200["memory"], h200["flops"], h200["bandwidth"]) == (150109880320, 989e12, 4.814304e12)
    assert [one["links"] for one in told if one["name"] in ("h200", "l4", "v5e", "v5p")] == [None, 450e9, 200e9, 600e9]
    (v6e,) = (entry for entry in told if entry["name"] == "v6e")
    assert v6e["examples"] == ["v6e:1x1", "v6e:2x2", "v6e:2x4", "v6e:16x16"]
    assert v6e["devices"] == [1, 4, 8, 256]
    (cpu,) = (entry for entry in told if entry["name"] == "cpu-avx2")
    assert cpu["memory"] is cpu["flops"] is cpu["bandwidth"] is cpu["links"] is None


def test_the_listing_is_a_table_for_a_reader() -> None:
    lines = checked("targets").splitlines()
    for line in (
        f"  cpu-avx512       {'-':>9}  {'-':>13}  {'-':>10}  {'-':>8}  "
        "Vectors of 512 bits: Intel Skylake-SP (2017), AMD Zen 4",
        f"  l4                22.5 GiB    121 TFLOP/s    300 GB/s  {'-':>8}  L4, 24 GB",
        "  h100-sxm          79.1 GiB    989 TFLOP/s  3,352 GB/s  450 GB/s  H100 SXM, 80 GB",
        "  b200             178.4 GiB  2,250 TFLOP/s  7,672 GB/s  900 GB/s  B200, 180 GB",
        "  mi300x           192.0 GiB  1,307 TFLOP/s  5,300 GB/s  448 GB/s  Instinct MI300X, 192 GB",
        "  tpu7x            192.0 GiB  2,307 TFLOP/s  7,380 GB/s  600 GB/s  TPU7x (Ironwood), 2025; two devices a chip",
        "    v5e:1x1 (1 device), v5e:2x2 (4 devices), v5e:2x4 (8 devices), v5e:16x16 (256 devices)",
        "  v4: https://docs.cloud.google.com/tpu/docs/v4",
    ):
        assert line in lines
    heads = [line for line in lines if line.startswith("  target")]
    assert len(heads) == 4
    assert len(set(heads)) == 1
