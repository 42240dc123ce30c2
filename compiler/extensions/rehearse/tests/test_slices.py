"""Rehearsals on TPUs that are not there: libtpu compiles, and each program finds in the folder all that it compiles.

Modules: `stagec_rehearse/slices.py`, `stagec_rehearse/running.py`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from compiler.extensions.rehearse.tests.processes import ALL, PROGRAMS, built, found_again, run, stagec
from stagec.backends.tpu import compiler
from stagec.jaxcache import jax_entries
from stagec_rehearse import programs, running
from tests.backends.deviceless import installed

with_libtpu = installed(libtpu="libtpu")
PROGRAM = """
import resource
import jax, jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

print(jax.devices()[3], jax.default_backend(), jax.devices()[0].device_kind, jax.devices("cpu"))

@jax.jit
def told(x):
    jax.debug.print("x {}", x, ordered=True)
    return jax.lax.platform_dependent(x, tpu=lambda x: x + 3, default=lambda x: x + 5)

told(jnp.ones(3))
jax.effects_barrier()
donated = jnp.zeros(4)
kept = jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
print("donated", donated.is_deleted(), kept)
compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
for _ in range(3):
    compiled(jnp.ones((8, 8)))
print(jax.random.key_data(jax.random.split(jax.random.key(0), 4)).sum())
given = jax.device_put(np.arange(16, dtype=np.float32), NamedSharding(Mesh(np.array(jax.devices()), "d"), P("d")))
print(float(np.asarray(given)[3]), jax.device_put(jnp.ones(2), jax.devices("cpu")[0]).device)
ref = jax.new_ref(jnp.ones(3))
jax.jit(lambda r: r.__setitem__(0, 7.0))(ref)
half = NamedSharding(Mesh(np.array(jax.devices()[4:]), "d"), P("d"))
print(len(jax.jit(lambda x: x * 3)(jax.device_put(np.ones(8, np.float32), half)).sharding.device_set))
large = jnp.zeros((3 << 28,), jnp.float32)
print("MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
jax.jit(lambda x: (x[:, None] * jnp.ones((1, 8))) @ jnp.ones((8, 8)))(large)
"""


@with_libtpu
@pytest.mark.parametrize(("name", "target"), [*[("equinox_loop", "v5e:1x1")] * ALL, ("fsdp", "v5e:2x4")])
def test_a_program_finds_all_that_it_compiles(name: str, target: str, tmp_path: Path) -> None:
    """On one device, and on all of a host."""
    result = found_again(name, "v5e", target, PROGRAMS[name], tmp_path)
    assert result.found == result.compiled >= result.built >= 20, result.said
    assert result.status == 0, result.said


@with_libtpu
def test_jax_sees_the_slice(tmp_path: Path) -> None:
    """Devices, memory kinds, donation and references are a TPU's; the large array takes no memory of this machine."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ("--", sys.executable, "program.py")
    done = run("-m", "stagec", "rehearse", "--device", "v5e:2x4", *command, cwd=tmp_path)
    told = done.stdout + done.stderr
    assert "stagec: 8 virtual TPU v5 lite (v5e:2x4); no program runs, and results are zeros\n" in done.stderr
    assert "TPU_3(process=0,(1,1,0,0)) tpu TPU v5 lite [CpuDevice(id=0)]\n" in told, told
    assert "donated True [0. 0. 0. 0.]\n" in told
    assert "3.0 cpu:0\n4\nMiB " in told, told
    assert int(told.partition("MiB ")[2].split()[0]) < 2048
    assert "RESOURCE_EXHAUSTED: Ran out of memory on HBM" in told
    assert "until it failed with status 1" in told
    listed = programs.read(str(tmp_path / "rehearsal" / programs.NAME))
    assert (listed.device, listed.devices) == ("v5e:2x4", 8)
    assert "libtpu" in listed.versions
    (product,) = (each for each in listed.programs if each.arguments == ["f32[8,8]"])
    assert product.runs == 3
    (told_of,) = (each for each in listed.programs if each.name == "jit_told")
    assert told_of.not_kept.startswith("it calls back into Python")
    (file,) = (each.file for each in listed.programs if each.devices == 4)
    (key,) = jax_entries.Key.read((tmp_path / "rehearsal" / programs.key_file(file)).read_bytes())
    assert [*key.ids] == [4, 5, 6, 7]
    assert b"tpu" in key.parts[jax_entries.PLATFORM]


POD = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

# No jax.distributed.initialize(): libtpu knows its hosts.
places = [(device.id, device.process_index, *device.coords) for device in jax.devices()]
print("devices", jax.process_index(), jax.process_count(), places, [device.id for device in jax.local_devices()])
mesh = jax.make_mesh((4, 4), ("a", "b"))
w = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, P("a", "b")))  # JAX compares the hosts' values
x = jax.make_array_from_process_local_data(NamedSharding(mesh, P(("a", "b"))), np.ones((4, 16), np.float32))

@jax.jit
def step(w, x):
    return w + 1, jnp.sum(x * 2)

w, loss = step(w, x)
print("shards", jax.process_index(), [shard.device.id for shard in w.addressable_shards], float(loss))
print(jax.jit(lambda x: x * 3)(jnp.ones(3)).device.process_index)
multihost_utils.sync_global_devices("end")
"""
OWN_KEY = """
import jax
import jax.numpy as jnp
from jax._src import compilation_cache, compiler
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

def stop(backend, computation, devices, options, *_, **__):
    raise SystemExit(print(compilation_cache.get_cache_key(computation, devices, options, backend)))

compiler.compile_or_get_cached = stop
devices = topologies.get_topology_desc("v5e:4x4", "tpu", chips_per_host_bounds=(2, 2, 1)).devices
mesh = Mesh(mesh_utils.create_device_mesh((4, 4), devices), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)

def given(shape, *axes):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))

@jax.jit
def step(w, x):
    return w + 1, jnp.sum(x * 2)

step.lower(given((16, 8), "a", "b"), given((16, 16), ("a", "b"))).compile()
"""


@with_libtpu
def test_a_slice_of_several_hosts(tmp_path: Path) -> None:
    """Each process has its host's chips; all that they compile is found, and a key is JAX's own for the slice."""
    (tmp_path / "program.py").write_text(POD)
    rehearse = ("-m", "stagec", "rehearse", "--device", "v5e:4x4", "--processes", "4")
    command = ("--", sys.executable, "program.py")
    done = run(*rehearse, *command, cwd=tmp_path)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert "rehearsed on 4 virtual v5e:4x4, 4 processes: " in told
    assert "compiled again and again" not in told
    for host, chips in enumerate(([0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15])):
        assert f"devices {host} 4 [(0, 0, 0, 0, 0), (1, 0, 1, 0, 0), (4, 0, 0, 1, 0), (5, 0, 1, 1, 0), (2, 1, " in told
        assert f"{chips}\n" in told, told
        assert f"shards {host} {chips} 0.0\n" in told, told
    listed = programs.read(str(tmp_path / "rehearsal" / programs.NAME))
    assert (listed.device, listed.devices, listed.processes) == ("v5e:4x4", 4, 4)
    cache, count = built(tmp_path / "rehearsal", "v5e:4x4", tmp_path)
    again = run(*rehearse, "-o", "again", "--jax-cache", cache, *command, cwd=tmp_path)
    ((number, compiled),) = re.findall(r"found in JAX's cache:\n  (\d+) of (\d+) compilations", again.stdout)
    assert (again.returncode, number) == (0, compiled), again.stdout
    assert int(compiled) >= count >= 10  # all hosts look for a program over the whole mesh
    variables = compiler.environment(running.tpus("v5e:4x4", 4)) | {"JAX_FORCE_TPU_INIT": "1", "JAX_PLATFORMS": "cpu"}
    own = run("-c", OWN_KEY, cwd=tmp_path, **variables)
    assert own.returncode == 0, own.stderr
    assert Path(cache, f"{own.stdout.strip()}-cache").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("v5e", "--devices", "3"),
            "no host has 3 devices of v5e\n  write --devices 1, 4 or 8",
        ),
        (
            ("v5e:4x4",),
            "v5e:4x4 has more than one host, and each has a process\n  write --processes 4",
        ),
        (("v4:4x4x8_twisted",), "v4:4x4x8_twisted has more than one host"),
        (("v5e:2x4", "--devices", "4"), "v5e:2x4 has 8 devices, not 4"),
        (("v5e", "--values", "cpu"), "--values cpu is for one GPU"),
        (("v5e", "--processes", "2"), "v5e is not a slice of 2 hosts\n  write one, such as v5e:2x4"),
        (("v5e:4x4", "--processes", "2"), "v5e:4x4 has 4 hosts, and each has a process\n  write --processes 4"),
        (("v5e:2x2", "--processes", "2"), "v5e:2x2 has 1 host, and each has a process\n  leave out --processes"),
        (("v5p:2x2x2", "--processes", "2", "--devices", "8"), "a host of v5p:2x2x2 has 4 devices, not 8"),
    ],
)
def test_what_cannot_be_rehearsed(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = stagec("rehearse", "--device", *words, "--", "true", cwd=tmp_path)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
