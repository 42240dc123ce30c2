"""What programs cost on TPUs and NVIDIA devices, by hand: XLA:TPU drops its notes of loops, XLA:GPU calls libraries.

Modules: `costs/*.py`, `stagec_insight/timelines.py`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tests.backends.deviceless import installed, run

with_tpu = installed(libtpu="libtpu")
with_cuda = installed(
    jax_cuda13_pjrt="jax_plugins.xla_cuda13",
    jax_cuda13_plugin="jax_cuda13_plugin",
    nvidia_cuda_nvcc="nvidia.cu13.bin",
    nvidia_nvvm="nvidia.cu13.nvvm",
)
_ANALYZE = """
import json, sys
platform, *targets = sys.argv[1:]
from stagec.backends import compilation
from stagec.hardware import catalog
import dataclasses
backend = compilation.backend(platform)
backend.prepare_process(catalog.target("v5e:1x1" if platform == "tpu" else "h200"))
from stagec.stages.exported import Exported
from stagec.stages.lowering import lower_exported
from stagec_insight import timelines
found = {}
for given in targets:
    name, target, topology = given.split(" ")
    spec = catalog.target(target)
    spec = dataclasses.replace(spec, topology=topology) if topology else spec
    with open(name, "rb") as file:
        compiled = lower_exported(Exported.deserialize(file.read()), platform, {}).compile(target=spec)
    found[name] = {**compiled.description.analysis, "xla": compiled.description.cost_analysis.get("flops")}
    trace = timelines.of(name, compiled.as_text(), compiled.description, backend.hardware(spec))
    found[name]["timeline"] = [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X"]
print(json.dumps(found))
"""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """An array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layers(weights: Any, x: Any) -> Any:
    """As many dense layers as there are weights."""
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def convolution(x: Any, w: Any) -> Any:
    """Of [image, row, column, channel] with [row, column, channel, result]."""
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def kernel(estimate: pl.CostEstimate | None) -> Callable[[Any], Any]:
    """A kernel of one's own, with what its author says of it."""

    def double(x: Any, y: Any) -> None:
        y[...] = x[...] * 2

    return pl.pallas_call(double, out_shape=f32(128, 128), cost_estimate=estimate)


PRODUCT = 2 * 128 * 256 * 256
PLACES = 2 * 8 * (3 * 28 - 2) ** 2 * 16 * 32
PAIRS = 2 * 2 * 8 * 128 * 128 * 64
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
    "dense": (lambda x, w: jnp.tanh(x @ w), (f32(128, 256), f32(256, 256)), PRODUCT),
    "attention": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        (f32(2, 128, 8, 64),) * 3,
        2 * PAIRS,
    ),
    "convolution": (convolution, (f32(8, 28, 28, 16), f32(3, 3, 16, 32)), PLACES),
    "backward": (
        jax.grad(lambda x, w: (convolution(x, w) ** 2).sum(), argnums=(0, 1)),
        (f32(8, 28, 28, 16), f32(3, 3, 16, 32)),
        3 * PLACES,
    ),
    "scan": (layers, (f32(12, 256, 256), f32(128, 256)), 12 * PRODUCT),
    "scan_backward": (jax.grad(lambda w, x: layers(w, x).sum()), (f32(12, 256, 256), f32(128, 256)), 3 * 12 * PRODUCT),
    "nested": (
        lambda w, x: lax.fori_loop(0, 5, lambda _, x: layers(w, x), x),
        (f32(7, 256, 256), f32(128, 256)),
        5 * 7 * PRODUCT,
    ),
    "down": (
        lambda w, x: lax.while_loop(lambda c: c[0] >= 1, lambda c: (c[0] - 3, jnp.tanh(c[1] @ w)), (20, x))[1],
        (f32(256, 256), f32(128, 256)),
        7 * PRODUCT,
    ),
    "complex": (
        jnp.matmul,
        (jax.ShapeDtypeStruct((64, 128), jnp.complex64), jax.ShapeDtypeStruct((128, 64), jnp.complex64)),
        4 * 2 * 64 * 128 * 64,
    ),
    "cholesky": (jax.scipy.linalg.cholesky, (f32(256, 256),), 256**3 / 3),
}
MESH = AbstractMesh((4,), ("d",), (jax.sharding.AxisType.Auto,))


def analyses(platform: str, folder: Path, targets: dict[str, str]) -> dict[str, Any]:
    """Compile exports of a folder in one process; return what is known of each. targets: by name, with topologies."""
    given = [f"{name} {target}" for name, target in targets.items()]
    done = run(_ANALYZE, platform, *given, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def export(folder: Path, platform: str, name: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Write an export."""
    exported = jax.export.export(jax.jit(function), platforms=[platform])(*arguments)
    (folder / name).write_bytes(exported.serialize())


def by_hand(platform: str, target: str, folder: Path, names: list[str]) -> dict[str, Any]:
    """Compile programs, and compare their operations with those counted by hand."""
    for name in names:
        function, arguments, _ = PROGRAMS[name]
        export(folder, platform, name, function, *arguments)
    found = analyses(platform, folder, dict.fromkeys(names, f"{target} "))
    for name in names:
        assert found[name]["flops"] == pytest.approx(PROGRAMS[name][2], rel=0.05), name
        assert found[name]["unknown"] == [], name
        assert found[name]["roofline"]["link_seconds"] == 0
        within_its_costs(found[name])
    return found


def within_its_costs(found: dict[str, Any]) -> None:
    """A timeline is as long as the roofline at least, and at most as if nothing went on beside anything else."""
    roofline, end = found["roofline"], max(event["ts"] + event["dur"] for event in found["timeline"]) / 1e6
    parts = sum(roofline[key] for key in ("compute_seconds", "memory_seconds", "link_seconds"))
    assert roofline["seconds"] * 0.99 <= end <= parts * 1.01


def sharded(folder: Path, platform: str, target: str) -> dict[str, Any]:
    """What twelve layers take on four devices that split their weights."""
    split = [NamedSharding(MESH, PartitionSpec(*axes)) for axes in ((None, "d"), ("d",))]
    function = jax.jit(layers, in_shardings=split, out_shardings=split[1])
    exported = jax.export.export(function, platforms=[platform])(f32(12, 512, 512), f32(256, 512))
    (folder / "sharded").write_bytes(exported.serialize())
    found: dict[str, Any] = analyses(platform, folder, {"sharded": target})["sharded"]
    assert found["flops"] == pytest.approx(12 * 2 * 64 * 512 * 512, rel=0.05)
    gathers = found["collectives"]["all-gather"]
    assert gathers["count"] == 12
    assert gathers["sent_bytes"] == gathers["bytes"] * 3 // 4
    within_its_costs(found)
    assert any(event["tid"] == 1 and event["cat"] in ("all-gather", "fusion") for event in found["timeline"])
    return found


@with_tpu
def test_a_chip(tmp_path: Path) -> None:
    # XLA:TPU makes three products of real numbers of one of complex numbers.
    found = by_hand("tpu", "v5e:1x1", tmp_path, [name for name in PROGRAMS if name not in ("complex", "cholesky")])
    assert found["scan"]["xla"] < 2 * PRODUCT, "XLA's own count is of one turn"
    # The weights are read once; everything else is in the core's own memory.
    assert found["scan"]["bytes_accessed"] < 1.2 * 4 * (12 * 256 * 256 + 2 * 128 * 256)


@with_cuda
def test_a_device(tmp_path: Path) -> None:
    by_hand("cuda", "h200", tmp_path, list(PROGRAMS))


@with_tpu
def test_four_chips(tmp_path: Path) -> None:
    found = sharded(tmp_path, "tpu", "v5e:2x2 ")
    # Of bfloat16, to which XLA rounds before it gathers; the chips are a grid of four, each with two links.
    assert found["collectives"]["all-gather"]["bytes"] == 12 * 512 * 512 * 2
    assert found["roofline"]["link_seconds"] == pytest.approx(12 * 512 * 512 * 2 * 3 / 4 / 100e9)
    assert found["roofline"]["bound"] == "links"


@with_cuda
@pytest.mark.parametrize(
    ("target", "bandwidth"),
    # NVLink; PCIe, which the L4 has instead; two hosts of two devices, each of which gets half from the other.
    [("h200 1x1x4", 450e9 / 0.75), ("l4 1x1x4", 34_359_738_368 / 0.75), ("h200 2x1x2", 50e9 * 2 / 0.5)],
)
def test_four_devices(tmp_path: Path, target: str, bandwidth: float) -> None:
    found = sharded(tmp_path, "cuda", target)
    assert found["collectives"]["all-gather"]["bytes"] == 12 * 512 * 512 * 4
    assert found["roofline"]["link_seconds"] == pytest.approx(12 * 512 * 512 * 4 / bandwidth)
    assert found["roofline"]["bound"] == "links"


@with_tpu
def test_what_the_author_of_a_kernel_says_counts(tmp_path: Path) -> None:
    estimate = pl.CostEstimate(flops=12345, transcendentals=0, bytes_accessed=6789)
    export(tmp_path, "tpu", "told", kernel(estimate), f32(128, 128))
    export(tmp_path, "tpu", "untold", kernel(None), f32(128, 128))
    found = analyses("tpu", tmp_path, {"told": "v5e:1x1 ", "untold": "v5e:1x1 "})
    assert (found["told"]["flops"], found["told"]["bytes_accessed"]) == (12345, 6789)
    assert (found["untold"]["flops"], found["untold"]["unknown"]) == ("unknown", ["what tpu_custom_call computes"])
