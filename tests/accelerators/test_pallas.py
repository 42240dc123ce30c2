"""Kernels as JAX lowers them where the device is: with libtpu, and with the CUDA plugin's parts of JAX."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from jaxlib.mlir import ir

from stagec.core.builds.specs import FunctionSpec, to_json
from stagec.hardware import catalog
from stagec.pjrt import packages
from stagec.stages import mlir
from tests.building import COMPILER, ROOT

THEIRS = """
import json, re, sys
import jax, jax.export
import jax.numpy as jnp
from tests.accelerators import kernels as model
jax.config.update("jax_traceback_in_locations_limit", 0)
platform, kind, topology, *functions = sys.argv[1:]
if platform == "tpu":
    from jax.experimental import topologies
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    assert device.device_kind == kind
    jax.config.update("jax_default_device", device)
    sharding, platforms = jax.sharding.SingleDeviceSharding(device), None
else:
    from stagec.frontends.jax import kernels
    from stagec.hardware import catalog
    described = kernels.Device.from_spec(catalog.target(topology).jax_device())
    there = kernels.on(described)
    there.__enter__()
    sharding, platforms = None, (platform,)
for function in functions:
    shape, dtype = ((256, 128), jnp.bfloat16) if function == "matmul" else ((256, 256), jnp.float32)
    count = 1 if function in ("sign", "blocked") else 2
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)] * count
    traced = jax.jit(getattr(model, function)).trace(*args)
    print(json.dumps([function, traced.lower(lowering_platforms=platforms).as_text()]))
"""
"""JAX's own lowering: for TPUs on devices of libtpu's, for NVIDIA devices as if one were there."""

OURS = """
import json, sys
from stagec.frontends.jax import export as frontend
from stagec.hardware import catalog
from stagec.core.builds.specs import function_spec
from stagec.building import by_device
from stagec.stages.exported import Exported
target = catalog.target(sys.argv[1])
for text in sys.argv[2:]:
    spec = function_spec(text)
    portable, lowered, _ = frontend.export(spec, ["."])
    own = by_device.read(lowered, target)
    modules = [Exported.deserialize(one).mlir_module() for one in (portable, own or portable)]
    print(json.dumps([spec.entry.partition(":")[2], *modules]))
"""


def run(script: str, *arguments: str, **env: str) -> list[list[str]]:
    path = os.pathsep.join([str(COMPILER), str(ROOT), *filter(None, sys.path)])
    environment = {"PATH": os.defpath, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **env}
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def kernel(text: str) -> dict[str, str]:
    """What the one custom call of a module says."""
    found: list[dict[str, str]] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            found.append({name: str(operation.attributes[name]) for name in operation.attributes})
        return ir.WalkResult.ADVANCE

    with mlir.make_context():
        ir.Module.parse(text).operation.walk(visit)
    (one,) = found
    # An export leaves out what is empty.
    return {name: said for name, said in one.items() if said != '""' and ("config" in name or "target" in name)}


ARGS = {"matmul": ["bf16[256,128]"] * 2, "sign": ["f32[256,256]"], "blocked": ["f32[256,256]"]}


def specs(name: str, functions: list[str]) -> list[str]:
    """The specs of functions for a target."""
    target = catalog.target(name)
    device = target.jax_device()
    assert device is not None
    common: dict[str, Any] = {
        "name": "f",
        "manifest": "m.toml",
        "kwargs": {},
        "avals": None,
        "constraints": [],
        "static": {},
        "donate_argnums": [],
        "donate_argnames": [],
        "keep_unused": False,
        "inline": False,
        "enable_x64": False,
        "vjp_order": 0,
        "platforms": [target.platform],
        "devices": [device],
    }
    found = []
    for function in functions:
        own = {"entry": f"tests.accelerators.kernels:{function}", "args": ARGS.get(function, ["f32[256,256]"] * 2)}
        parts = ["cuda"] if function in ("mosaic", "default") else []
        found.append(to_json(FunctionSpec(**common, **own, plugins=parts)))
    return found


def installed(*wanted_packages: str) -> pytest.MarkDecorator:
    missing = [name for name in wanted_packages if packages.folder(name) is None]
    wanted = "STAGEC_PLUGINS" in os.environ
    return pytest.mark.skipif(bool(missing) and not wanted, reason=f"not installed: {', '.join(missing)}")


@installed("libtpu")
@pytest.mark.parametrize(
    ("target", "kind"), [("v5e:2x2", "TPU v5 lite"), ("v6e:2x2", "TPU v6 lite"), ("v5p:2x2x1", "TPU v5")]
)
def test_kernels_for_tpus_are_as_where_one_is(target: str, kind: str) -> None:
    functions = ["matmul", "sign", "blocked"]
    told = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    told |= {"TPU_WORKER_ID": "0", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled"}
    theirs = run(THEIRS, "tpu", kind, target, *functions, **told)
    ours = run(OURS, target, *specs(target, functions))
    for (name, module), (same, portable, own) in zip(theirs, ours, strict=True):
        assert name == same
        assert kernel(own) == kernel(module)
        assert kernel(portable) != kernel(module)


@installed("jax_cuda13_plugin", "nvidia.cu13")
@pytest.mark.parametrize("target", ["h200", "b200"])
def test_kernels_for_nvidia_devices_are_as_where_one_is(target: str) -> None:
    functions = ["triton", "mosaic", "default"]
    theirs = run(THEIRS, "cuda", "", target, *functions)
    ours = run(OURS, target, *specs(target, functions))
    for (name, module), (same, portable, own) in zip(theirs, ours, strict=True):
        assert name == same
        assert kernel(own) == kernel(module)
        assert (kernel(portable) == kernel(module)) == (name == "triton")
