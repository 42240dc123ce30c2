"""Compiling for TPUs on a machine without one: topologies, meshes, equal bytes, and what is refused.

Modules: `backends/plugins.py`, `backends/tpu/compiler.py`, `backends/tpu/mesh.py`.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from stagec.backends import plugins
from stagec.backends.compilation import CannotCompile
from stagec.backends.tpu import compiler as tpu
from stagec.core.builds import releases
from stagec.jaxcache import jax_entries
from stagec.patches import known_builds
from stagec.pjrt import compatibility
from tests.backends import deviceless
from tests.backends.deviceless import CUSTOM_CALL, compile_again, compile_elsewhere, installed, layer, run

with_libtpu = installed(libtpu="libtpu")


@with_libtpu
@pytest.mark.parametrize(
    ("topology", "device"),
    [
        ("v4:1x1x1", "TPU v4"),
        ("v5e:1x1", "TPU v5 lite"),
        ("v5p:1x1x1", "TPU v5"),
        ("v6e:1x1", "TPU v6 lite"),
        ("tpu7x:1x1x1", "TPU7x"),
        ("v2:2x2", "TPU v2"),
    ],
)
def test_a_function_for_one_device(tmp_path: Path, topology: str, device: str) -> None:
    made = compile_again(tmp_path, "tpu", topology, layer())
    assert made.refused == ("", "", "")
    assert (made.device, made.jax) == (device, False)
    assert made.cost is not None
    assert made.memory is not None
    assert made.cost["flops"] >= 2 * 256 * 512 * 512
    assert made.memory["argument_size_in_bytes"] == 4 * (256 * 512 + 512 * 512)
    assert made.memory["peak_memory_in_bytes"] >= made.memory["argument_size_in_bytes"]


@with_libtpu
@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        ("v4:2x2x1", {"data": 2, "model": 2}),
        ("v5e:2x2", {"data": 2, "model": 2}),
        ("v5p:2x2x2", {"data": 2, "model": 4}),
        ("v6e:2x4", {"data": 4, "model": 2}),
        ("tpu7x:2x2x1", {"data": 2, "model": 4}),
        ("v6e:16x16", {"data": 16, "model": 16}),
        ("v5p:8x8x16", {"data": 64, "model": 16}),
    ],
)
def test_a_sharded_function_has_a_collective_and_its_part_of_the_arguments(
    tmp_path: Path, topology: str, mesh: dict[str, int]
) -> None:
    made = compile_again(tmp_path, "tpu", topology, layer(mesh, rows=1024), tuple(mesh.values()))
    assert made.refused == ("", "", "")
    assert "all-reduce" in made.hlo or "reduce-scatter" in made.hlo
    assert made.memory is not None
    data, model = mesh.values()
    parts = 1024 // data * (512 // model), 512 // model * 512
    # Rows are padded to the tiles of the chip's memory.
    assert 4 * sum(parts) <= made.memory["argument_size_in_bytes"] <= 4 * 1024 * 512


@with_libtpu
def test_a_twisted_torus_has_other_code(tmp_path: Path) -> None:
    mesh = {"data": 16, "model": 8}
    names = ("v5p:4x4x8", "v5p:4x4x8_twisted")
    made = [compile_again(tmp_path, "tpu", name, layer(mesh), (16, 8)) for name in names]
    assert [one.refused for one in made] == [("", "", "")] * 2
    assert made[0].sha256 != made[1].sha256


@with_libtpu
def test_several_slices(tmp_path: Path) -> None:
    mesh = {"data": 8, "model": 4}
    made = compile_again(tmp_path, "tpu", "v6e:4x4", layer(mesh), (8, 4), slices=2)
    assert made.refused == ("", "", "")
    assert made.sha256 != compile_again(tmp_path, "tpu", "v6e:4x8", layer(mesh), (8, 4)).sha256
    refused = compile_again(tmp_path, "tpu", "v6e:4x4", layer({"data": 1, "model": 32}), (1, 32), slices=2).refused
    assert refused == (
        "the first axis of the mesh, 1, is not a multiple of the 2 slices",
        "slices",
        "make the first axis of the mesh the one that goes over slices",
    )


@with_libtpu
@pytest.mark.parametrize(("topology", "mesh"), [("v5e:1x1", {}), ("v6e:4x4", {"data": 4, "model": 4})])
def test_another_process_makes_the_same_bytes(tmp_path: Path, topology: str, mesh: dict[str, int]) -> None:
    env = {"LIBTPU_INIT_ARGS": "--xla_tpu_enable_latency_hiding_scheduler=false", "TPU_ACCELERATOR_TYPE": "v4-8"}
    first = compile_elsewhere(tmp_path, "tpu", topology, layer(mesh or None), tuple(mesh.values()), env=env)
    assert os.fsencode(tmp_path) not in first.executable


@with_libtpu
def test_jaxs_flag_of_libtpu_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its keys may have it, and what they name is compiled without; another flag shows that flags are read."""
    made = []
    for flags in ("", jax_entries.TPU_FLAG, "--xla_tpu_scoped_vmem_limit_kib=8192"):
        with monkeypatch.context() as changed:
            changed.setattr(deviceless, "_COMPILE", _FLAGS.format(flags) + deviceless._COMPILE)
            made.append(compile_again(tmp_path, "tpu", "v5e:2x2", layer({"data": 2, "model": 2}), (2, 2)).sha256)
    assert made[0] == made[1] != made[2]


_FLAGS = """
from stagec.backends.tpu import compiler
own = compiler.environment
compiler.environment = lambda target: {{**own(target), "LIBTPU_INIT_ARGS": "{}"}}
"""


def left_behind() -> set[Path]:
    """Return which of libtpu's files there are: its lock, which stays if its process is killed, and its logs."""
    return {*Path("/tmp").glob("libtpu_lockfile*"), *Path("/tmp/tpu_logs").glob("*")}


@with_libtpu
def test_compiling_leaves_nothing_behind(tmp_path: Path) -> None:
    before = left_behind()
    compile_again(tmp_path, "tpu", "v5e:1x1", layer())
    assert left_behind() <= before, "the command that compiles left it"


@with_libtpu
def test_how_many_chips_a_host_has_is_part_of_the_target(tmp_path: Path) -> None:
    module = layer({"data": 4, "model": 2})
    two_hosts = compile_again(tmp_path, "tpu", "v6e:2x4", module, (4, 2))
    one_host = compile_again(tmp_path, "tpu", "v6e:2x4", module, (4, 2), host="2x4")
    assert "" == two_hosts.refused[0] == one_host.refused[0]
    assert two_hosts.sha256 != one_host.sha256


_ORDERS = """
import json, sys
from stagec.backends import plugins
from stagec.backends.tpu import compiler as tpu, mesh as tpu_mesh
from stagec.hardware import catalog, tpu as tpus
from stagec.hardware.tpu_topologies import parse_topology
tpu.prepare_process(catalog.target("v5e:2x2"))
import numpy as np
from jax.experimental import mesh_utils
for text, meshes in json.loads(sys.argv[1]):
    topology = parse_topology(text, tpus.generations())
    devices = plugins.topology_devices(tpu.PLUGIN, str(topology), topology.options())
    assert len(devices) == topology.num_devices, text
    for mesh in meshes:
        wanted = [d.id for d in mesh_utils.create_device_mesh(mesh, devices, allow_split_physical_axes=True).flat]
        found = [devices[i].id for i in tpu_mesh.order(devices, mesh)]
        assert found == wanted, (text, mesh, found, wanted)
print("equal")
"""


@with_libtpu
def test_a_mesh_lies_on_a_topology_as_jax_lays_it(tmp_path: Path) -> None:
    cases = [
        ("v2:4x4", [(32,), (4, 8), (2, 16)]),
        ("v4:2x2x4", [(16,), (4, 4), (8, 2), (2, 2, 4)]),
        ("v4:4x4x4", [(64,), (16, 4), (4, 16), (2, 32), (4, 4, 4)]),
        ("v5e:2x2", [(4,), (2, 2), (1, 4)]),
        ("v5e:2x4", [(8,), (2, 4), (4, 2)]),
        ("v5e:4x4", [(16,), (4, 4), (8, 2), (2, 2, 4)]),
        ("v5e:8x8", [(64,), (2, 4, 8), (4, 16)]),
        ("v5p:2x2x2", [(8,), (2, 4), (4, 2), (2, 2, 2)]),
        ("v5p:4x4x8", [(128,), (16, 8), (8, 16), (4, 32), (2, 4, 16)]),
        ("v6e:8x16", [(128,), (8, 16), (16, 8), (2, 64), (4, 32)]),
        ("tpu7x:2x2x2", [(16,), (2, 8), (8, 2)]),
        ("tpu7x:2x4x4", [(64,), (4, 16), (16, 4), (2, 4, 8)]),
    ]
    done = run(_ORDERS, json.dumps(cases), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


_JAX_ORDERS = """
import dataclasses, json, sys
from stagec.backends import plugins
from stagec.backends.tpu import compiler as tpu
from stagec.hardware import catalog, tpu as tpus
from stagec.hardware.tpu_topologies import parse_topology
tpu.prepare_process(catalog.target("v5e:2x2"))
from jax.experimental import mesh_utils
found = []
for text, slices, mesh in json.loads(sys.argv[1]):
    topology = parse_topology(text, tpus.generations(), slices=slices)
    devices = plugins.topology_devices(tpu.PLUGIN, str(topology), topology.options())
    if slices == 1:
        order = mesh_utils.create_device_mesh(mesh, devices)
    else:
        inner, outer = (mesh[0] // slices, *mesh[1:]), (slices, *(1 for _ in mesh[1:]))
        order = mesh_utils.create_hybrid_device_mesh(inner, outer, devices)
    found.append([[d.id for d in order.flat], [[*d.coords, d.core_on_chip] for d in order.flat]])
print(json.dumps(found))
"""


@with_libtpu
def test_the_devices_that_are_told_are_in_the_order_of_jax(tmp_path: Path) -> None:
    cases = [("v5e:2x4", 1, (2, 4)), ("tpu7x:2x2x1", 1, (4, 2)), ("v6e:4x4", 2, (2, 16))]
    done = run(_JAX_ORDERS, json.dumps(cases), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for (topology, slices, mesh), (ids, coords) in zip(cases, json.loads(done.stdout), strict=True):
        module = layer(dict(zip(("data", "model"), mesh, strict=True)))
        made = compile_again(tmp_path, "tpu", topology, module, mesh, slices=slices)
        assert (made.device_ids, made.coords) == (ids, coords)
        assert ids != sorted(ids)


@with_libtpu
def test_a_program_that_does_not_fit_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    module = layer().replace("256x512", "65536x65536").replace("512x512", "65536x65536")
    # Before 0.0.42 libtpu listed the largest buffers too.
    what, key, write = compile_again(tmp_path, "tpu", "v6e:1x1", module).refused
    assert (what, key) == ("the program does not fit into the device's memory: needs 48.00G, has 31.25G", "")
    assert "https://" not in write


@with_libtpu
@pytest.mark.parametrize(
    ("option", "value", "refused"),
    [
        (
            "xla_tpu_scoped_vmem_limit_kb",
            1,
            (
                "libtpu has no option xla_tpu_scoped_vmem_limit_kb",
                "compiler_options.xla_tpu_scoped_vmem_limit_kb",
                "did you mean xla_tpu_scoped_vmem_limit_kib?",
            ),
        ),
        (
            "xla_tpu_scoped_vmem_limit_kib",
            "many",
            (
                "XLA refuses the option: INVALID_ARGUMENT: Failed to parse 'many' into flag "
                "xla_tpu_scoped_vmem_limit_kib: ",
                "compiler_options.xla_tpu_scoped_vmem_limit_kib",
                "",
            ),
        ),
    ],
)
def test_an_option_that_libtpu_does_not_take(
    tmp_path: Path, option: str, value: object, refused: tuple[str, str, str]
) -> None:
    found = compile_again(tmp_path, "tpu", "v5e:1x1", layer(), compiler_options={option: value}).refused
    assert tuple(text.strip() for text in found) == tuple(text.strip() for text in refused)


@with_libtpu
@pytest.mark.parametrize(
    ("option", "value", "program"),
    [("xla_tpu_scoped_vmem_limit_kib", 32768, "same"), ("optimization_level", "O0", "other")],
)
def test_an_option_changes_the_code(tmp_path: Path, option: str, value: object, program: str) -> None:
    plain = compile_again(tmp_path, "tpu", "v5e:1x1", layer())
    changed = compile_again(tmp_path, "tpu", "v5e:1x1", layer(), compiler_options={option: value})
    assert "" == plain.refused[0] == changed.refused[0]
    assert plain.sha256 != changed.sha256
    assert program == ("same" if plain.hlo == changed.hlo else "other")


@with_libtpu
def test_a_custom_call_that_tpus_do_not_have(tmp_path: Path) -> None:
    what, _, _ = compile_again(tmp_path, "tpu", "v5e:1x1", CUSTOM_CALL).refused
    assert what == "XLA refuses the module: INVALID_ARGUMENT: Custom emitter for lapack_spotrf_ffi not found"


@with_libtpu
def test_a_mesh_of_another_size_than_the_topology(tmp_path: Path) -> None:
    found = compile_again(tmp_path, "tpu", "v5e:4x4", layer({"data": 2, "model": 4}), (2, 4)).refused
    assert found == (
        "the function's mesh has 8 devices, topology v5e:4x4 has 16",
        "topology",
        "write a topology of 8 devices, or a mesh of 16",
    )


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], plugins.Plugin]:
    """Makes a plugin of a package and a distribution, of which this jaxlib needs that version."""

    def made(package: str, distribution: str, version: str) -> plugins.Plugin:
        row = releases.Release("2026-01-01", {distribution: version})
        monkeypatch.setattr(releases, "known", lambda: {compatibility.version(): row})
        return plugins.Plugin("tpu", package, "__init__.py", distribution, own_versions=True)

    return made


TO_LOCK = (
    "write {} to a lock of its own, with hashes, and name it tpu_lock beside lock:\n"
    "in stagec.python(...) of MODULE.bazel, or in stagec_repositories(...) of WORKSPACE (docs/accelerators.md)"
)


def test_a_plugin_that_is_not_installed(plugin: Callable[..., plugins.Plugin]) -> None:
    with pytest.raises(CannotCompile) as caught:
        plugins.load(plugin("no_such_package", "no-such-package", "1.2"))
    assert str(caught.value) == "the plugin that compiles for tpu is not installed: no-such-package"
    assert caught.value.write == TO_LOCK.format("no-such-package==1.2.*")


def test_a_plugin_for_another_jaxlib(plugin: Callable[..., plugins.Plugin]) -> None:
    found = importlib.metadata.version("numpy")
    with pytest.raises(CannotCompile) as caught:
        plugins.load(plugin("numpy", "numpy", "0.0.1"))
    assert str(caught.value) == f"numpy {found} is not for jaxlib {compatibility.version()}"
    assert caught.value.write == TO_LOCK.format("numpy==0.0.1.*")


def test_a_plugin_for_a_release_that_the_project_does_not_know(
    plugin: Callable[..., plugins.Plugin],
) -> None:
    """The lock says which version is for it. Its build must be known, as any."""
    with pytest.raises(CannotCompile, match=r" cannot be used on this machine: "):
        plugins.load(plugin("numpy", "numpy", ""))


def test_a_plugin_without_a_known_build_for_this_jaxlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "version", lambda: "0.12.0.1")
    monkeypatch.setattr(plugins, "version", lambda plugin: "0.10.2")
    monkeypatch.setattr(plugins, "path", lambda plugin: Path("xla_rocm_plugin.so"))
    with pytest.raises(CannotCompile) as caught:
        plugins.load(plugins.of("rocm"))
    assert str(caught.value) == "jax-rocm7-pjrt 0.10.2 is not for jaxlib 0.12.0.1"
    known = " or ".join(row.version for row in known_builds.rows() if known_builds.wheel(row) == "jax-rocm7-pjrt")
    assert known.startswith("0.10.2 or ")
    assert caught.value.write == (
        f"of jax-rocm7-pjrt, stagec knows {known}: lock jax and jaxlib {known} (docs/accelerators.md)"
    )


def test_a_plugin_that_does_not_run_on_this_machine(plugin: Callable[..., plugins.Plugin]) -> None:
    found = importlib.metadata.version("numpy")
    with pytest.raises(CannotCompile, match=f"^numpy {found} cannot be used on this machine: "):
        plugins.load(plugin("numpy", "numpy", found))


def test_a_plugin_on_another_kind_of_cpu(
    plugin: Callable[..., plugins.Plugin], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.metadata.version("numpy")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(CannotCompile) as caught:
        plugins.load(plugin("numpy", "numpy", found))
    assert str(caught.value) == "numpy runs on x86-64 machines only; this one is aarch64"


_WITHOUT_SYSFS = ("unshare", "--mount", "sh", "-c", 'umount --lazy /sys && exec "$@"', "sh")
NO_SYSFS = (
    "libtpu does not run on this machine: it needs /sys/devices/system/cpu/possible, which is missing here",
    "",
    "mount sysfs, as mount -t sysfs sysfs /sys does; a container or chroot may lack it",
)


@with_libtpu
def test_a_process_that_has_no_sysfs(tmp_path: Path) -> None:
    if not shutil.which("unshare") or subprocess.run([*_WITHOUT_SYSFS, "true"], capture_output=True).returncode:
        pytest.skip("this process may not change its mounts")
    assert compile_again(tmp_path, "tpu", "v5e:1x1", layer(), under=_WITHOUT_SYSFS).refused == NO_SYSFS


@pytest.mark.parametrize("possible", [None, "", "\n"])
def test_a_machine_without_the_file_that_libtpu_ends_the_process_for(tmp_path: Path, possible: str | None) -> None:
    file = tmp_path / "sys" / "devices" / "system" / "cpu" / "possible"
    file.parent.mkdir(parents=True)
    if possible is not None:
        file.write_text(possible)
    with pytest.raises(CannotCompile) as caught:
        tpu.check_machine(tmp_path)
    assert (str(caught.value), caught.value.key, caught.value.write) == NO_SYSFS
    file.write_text("0-1\n")
    tpu.check_machine(tmp_path)


def test_a_cpu_that_libtpu_is_not_compiled_for() -> None:
    enough = tpu._NEEDED_CPU_FLAGS | {"fpu"}
    tpu.check_machine(cpu_flags=enough)
    tpu.check_machine(cpu_flags=frozenset())
    with pytest.raises(CannotCompile) as caught:
        tpu.check_machine(cpu_flags=enough - {"avx", "aes"})
    assert str(caught.value) == "libtpu does not run on this machine: its CPU lacks aes, avx"
    assert caught.value.write == "build for TPUs on a machine whose CPU has these; the bytes are the same"
