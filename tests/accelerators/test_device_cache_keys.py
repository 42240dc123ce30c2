"""Keys of JAX's compilation cache for TPUs, made without JAX's client: they are those that JAX has for the topology."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stagec.jaxcache import jax_entries
from stagec.pjrt import packages
from tests.building import COMPILER, ROOT, checked, write_specs

OWN = """
import json, os, sys
import jax, numpy as np
from jax._src import compilation_cache, compiler
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from tests.accelerators import kernels, model

class Key(Exception):
    pass

def stop(backend, computation, devices, compile_options, *others, **named):
    raise Key(compilation_cache.get_cache_key(computation, devices, compile_options, backend))

def key(function, *args):
    try:
        function.lower(*args).compile()
    except Key as found:
        print(found, flush=True)

compiler.compile_or_get_cached = stop
four = topologies.get_topology_desc("v5e:2x2", "tpu", chips_per_host_bounds=(2, 2, 1)).devices
mesh = Mesh(mesh_utils.create_device_mesh((2, 2), four), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

def split(dtype, shape, *axes):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

weights = {"w": split("f4", (128, 64), "model"), "b": split("f4", (64,))}
with jax.set_mesh(mesh):
    out = NamedSharding(mesh, P("data"))
    key(jax.jit(model.dense, out_shardings=out), weights, split("f4", (8, 128), "data", "model"))
one = topologies.get_topology_desc("v5e:1x1", "tpu", chips_per_host_bounds=(1, 1, 1)).devices[0]
x = jax.ShapeDtypeStruct((256, 128), jax.numpy.bfloat16, sharding=SingleDeviceSharding(one))
key(jax.jit(kernels.matmul), x, x)
key(jax.jit(kernels.matmul, compiler_options={"xla_tpu_scoped_vmem_limit_kib": 8192}), x, x)
"""


def test_keys_of_a_tpu_are_those_of_jax(tmp_path: Path) -> None:
    """Over four chips, in the order of `jax.make_mesh`, and of a kernel of Pallas on one; also with an option."""
    if packages.folder("libtpu") is None:
        pytest.skip("not installed: libtpu")
    write_specs("tests/accelerators/accelerators.toml", ROOT, tmp_path)
    ours = []
    option = {"xla_tpu_scoped_vmem_limit_kib": 8192}
    rows = ("sharded", "v5e-2x2", "none", {}), ("matmul", "v5e-1x1", "0,1", {}), ("matmul", "v5e-1x1", "0,1", option)
    for name, target, committed, options in rows:
        executable, key = tmp_path / f"accelerators.{name}.{target}.spec", tmp_path / f"{name}.key"
        described = json.loads(executable.read_text())
        described["target"]["compiler_options"] = options
        executable.write_text(json.dumps(described))
        words = ["--output", key, "--executable", executable, "--committed", committed, "--import-root", ROOT]
        checked("action", "jax-key", "--spec", tmp_path / f"accelerators.{name}.spec", *words)
        words = ["--key", key, "--output", tmp_path / f"{name}.xla", "--entry", tmp_path / f"{name}.json"]
        checked("action", "jax-compile", "--spec", executable, *words)
        (entry,) = json.loads((tmp_path / f"{name}.json").read_text())["entries"]
        ours.append(entry["names"])
    packages_of_tests = [entry for entry in sys.path if entry.endswith("site-packages")]
    env = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_FORCE_TPU_INIT": "1",  # JAX adds its flag of libtpu, as on a machine with TPUs
        "JAX_PLATFORMS": "cpu",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([*packages_of_tests, str(COMPILER), str(ROOT)]),
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
    command = [sys.executable, "-B", "-s", "-S", "-c", OWN]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    own = done.stdout.split()
    assert len(own) == 3
    for name, names in zip(own, ours, strict=True):
        assert name in {key for compression in names.values() for key in compression.values()}


def test_an_option_of_the_target_comes_before_a_flag(tmp_path: Path) -> None:
    if packages.folder("libtpu") is None:
        pytest.skip("not installed: libtpu")
    write_specs("tests/accelerators/accelerators.toml", ROOT, tmp_path)
    plain = json.loads((tmp_path / "accelerators.matmul.v5e-1x1.spec").read_text())
    option = "xla_tpu_scoped_vmem_limit_kib"
    made = {}
    for options in ({}, {option: 8192}):
        plain["target"]["compiler_options"] = options
        executable, key = tmp_path / "executable.spec", tmp_path / "key"
        executable.write_text(json.dumps(plain))
        words = ["--output", key, "--executable", executable, "--committed", "0,1", "--import-root", ROOT]
        checked("action", "jax-key", "--spec", tmp_path / "accelerators.matmul.spec", *words)
        (own,) = jax_entries.Key.read(key.read_bytes())
        for flags in (b"", f"--{option}=32768".encode()):
            key.write_bytes(own.with_parts({jax_entries.FLAGS: flags}).to_bytes())
            words = ["--key", key, "--output", tmp_path / "xla", "--entry", tmp_path / "json"]
            checked("action", "jax-compile", "--spec", executable, *words)
            made[len(options), flags != b""] = (tmp_path / "xla").read_bytes()
    assert made[0, False] != made[0, True]
    assert made[1, False] == made[1, True]
