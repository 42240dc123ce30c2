"""Metrics and limits of executables, through the commands: what is over a limit, and what that changes.

Modules: `cli/actions/compile.py`, `building/compilation.py`, `building/inventory.py`.
"""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from stagec.core.builds.specs import Limits
from stagec.stages.compiled import Compiled
from stagec.stages.exported import Exported
from stagec.stages.lowering import lower_exported
from tests.building import checked, stagec, write_specs

MODEL = """
import jax
import jax.numpy as jnp


def step(params, x):
    y = jnp.tanh(x @ params["w"] + params["b"])
    return {"w": params["w"] - 0.1 * (x.T @ y), "b": params["b"]}, y.sum()


def factor(x):
    return jnp.linalg.eigh(x)[0]


def layers(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def exchange(n, x):
    def part(n, x):
        return jax.lax.fori_loop(0, n, lambda _, x: jax.lax.psum(x, "d") / 4 + x, x)

    spec = jax.sharding.PartitionSpec("d")
    return jax.shard_map(part, in_specs=(jax.sharding.PartitionSpec(), spec), out_specs=spec, check_vma=False)(n, x)


def settle(x):
    return jax.lax.while_loop(lambda x: (x @ x).sum() > 1, lambda x: jnp.tanh(x @ x), x)
"""
MANIFEST = """
[manifest]
name = "m"
version = "1"
[functions.step]
entry = "limited:step"
args = [{ w = "f32[64,64]", b = "f32[64]" }, "f32[batch,64]"]
buckets = { batch = [32] }
donate_argnums = [0]
targets = ["cpu-avx2"]
[functions.factor]
entry = "limited:factor"
args = ["f32[8,8]"]
targets = ["cpu-avx2"]
[functions.layers]
entry = "limited:layers"
args = ["f32[24,64,64]", "f32[32,64]"]
targets = ["cpu-avx2"]
[functions.settle]
entry = "limited:settle"
args = ["f32[8,8]"]
targets = ["cpu-avx2"]
[functions.exchange]
entry = "limited:exchange"
args = ["i32[]", "f32[8]"]
mesh = "four"
in_shardings = ["P()", "P(d)"]
out_shardings = "P(d)"
targets = ["cpu-avx2"]
[meshes.four]
axes = { d = 4 }
"""
STEP, FACTOR = "m.step.cpu-avx2.batch32", "m.factor.cpu-avx2"
LAYERS, SETTLE, EXCHANGE = "m.layers.cpu-avx2", "m.settle.cpu-avx2", "m.exchange.cpu-avx2"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with its manifest, specs, exports, and executables without limits."""
    root = tmp_path_factory.mktemp("limits")
    (root / "limited.py").write_text(MODEL)
    (root / "m.toml").write_text(MANIFEST)
    plan = write_specs("m.toml", root, root)
    for export in plan["exports"]:
        stem = root / export["name"]
        checked("action", "export", "--spec", f"{stem}.spec", "--output", f"{stem}.exported", "--import-root", root)
    for name in (STEP, FACTOR, LAYERS, SETTLE, EXCHANGE):
        status, message = compiled(root, name, root / f"{name}.xla")
        assert (status, message) == (0, "")
    return root


def compiled(built: Path, name: str, output: Path, *more: str, **limits: Any) -> tuple[int, str]:
    """Compile an executable with limits and `more` options; return the exit status and what the command says."""
    limited = json.loads((built / f"{name}.spec").read_text())
    assert limited["limits"] == Limits().__dict__
    limited["limits"] |= {"key": "functions.f.limits.t" if limits else "", **limits}
    (output.parent / "limited.spec").write_text(json.dumps(limited))
    done = stagec(
        *("action", "compile", "--spec", output.parent / "limited.spec"),
        *("--exported", built / f"{'.'.join(name.split('.')[:2])}.exported"),
        *("--output", output, "--description", output.with_suffix(".json"), *more),
    )
    return done.returncode, done.stderr


def analysis_of(built: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((built / f"{name}.json").read_text())["analysis"]
    return found


def test_a_description_has_the_metrics(built: Path) -> None:
    found = analysis_of(built, STEP)
    weights, bias, x = 4 * 64 * 64, 4 * 64, 4 * 32 * 64
    assert found["argument_bytes"] == weights + bias + x
    assert found["output_bytes"] >= weights + bias + 4
    assert found["alias_bytes"] == weights + bias
    assert found["temporary_bytes"] >= 4 * 32 * 64
    assert found["peak_bytes"] >= weights + bias + x
    assert found["flops"] >= 2 * 2 * 32 * 64 * 64
    assert found["bytes_accessed"] > weights
    assert found["collectives"] == {}
    # XLA:CPU does not say how large code is, and an instruction set has no peak.
    assert (found["code_bytes"], found["roofline"]) == ("unknown", "unknown")
    assert found["unknown"] == []


def test_a_loop_counts_as_often_as_it_turns(built: Path) -> None:
    found = json.loads((built / f"{LAYERS}.json").read_text())
    product = 2 * 32 * 64 * 64
    assert 24 * product <= found["analysis"]["flops"] < 1.01 * 24 * product
    assert product <= found["cost_analysis"]["flops"] < 1.01 * product, "XLA's own count, under its own name"
    assert found["analysis"]["bytes_accessed"] > 24 * found["cost_analysis"]["bytes_accessed"] / 2


def test_inspect_shows_the_metrics(built: Path) -> None:
    found = analysis_of(built, STEP)
    lines = checked("inspect", built / f"{STEP}.json").splitlines()
    assert f"  peak       {found['peak_bytes']:,} bytes on one device" in lines
    assert any(line.startswith(f"  memory     arguments {found['argument_bytes']:,}, outputs ") for line in lines)
    assert any(line.endswith(", code unknown") for line in lines)
    assert f"  flops      {found['flops']:,.0f}" in lines
    assert "  roofline   unknown" in lines
    assert not any(line.startswith(("  exchanges", "  unknown")) for line in lines)


def test_inspect_tells_what_xla_counts_and_what_is_unknown(built: Path) -> None:
    own = json.loads((built / f"{LAYERS}.json").read_text())["cost_analysis"]
    lines = checked("inspect", built / f"{LAYERS}.json").splitlines()
    told = f"flops {own['flops']:,.0f}, accesses {own['bytes_accessed']:,.0f} bytes"
    assert f"  XLA says   {told}, each loop once" in lines
    lines = checked("inspect", built / f"{SETTLE}.json").splitlines()
    assert "  flops      unknown" in lines
    assert "  unknown    how often the loop jit(settle)/while turns" in lines
    assert "  XLA says   flops unknown, accesses unknown bytes, each loop once" in checked(
        "inspect", built / f"{FACTOR}.json"
    )


def test_an_executable_within_its_limits_has_the_same_bytes(built: Path, tmp_path: Path) -> None:
    found = analysis_of(built, STEP)
    limits = {
        "peak_memory": found["peak_bytes"],
        "flops": int(found["flops"]),
        "bytes_accessed": int(found["bytes_accessed"]),
        "collectives": 0,
        "executable_size": (built / f"{STEP}.xla").stat().st_size,
        "compile_time": 1000,
    }
    assert compiled(built, STEP, tmp_path / "f.xla", **limits) == (0, "")
    for ending in ("xla", "json"):
        assert (tmp_path / f"f.{ending}").read_bytes() == (built / f"{STEP}.{ending}").read_bytes()


@pytest.mark.parametrize(
    ("limit", "figure", "what"),
    [
        ("flops", "flops", "flops {figure:,.0f} is over the limit of {limit:,.0f}"),
        ("bytes_accessed", "bytes_accessed", "bytes accessed {figure:,.0f} is over the limit of {limit:,.0f}"),
        ("executable_size", "", "size of the executable {figure:,.0f} is over the limit of {limit:,.0f}"),
    ],
)
def test_one_more_than_the_limit_fails(built: Path, tmp_path: Path, limit: str, figure: str, what: str) -> None:
    size = (built / f"{STEP}.xla").stat().st_size
    exact = int(analysis_of(built, STEP)[figure]) if figure else size
    status, message = compiled(built, STEP, tmp_path / "f.xla", **{limit: exact - 1})
    told = what.format(figure=exact, limit=exact - 1)
    assert message == f"m.toml: functions.f.limits.t.{limit}: step for cpu-avx2, batch = 32: {told}\n"
    assert status == 2
    assert [file.name for file in tmp_path.iterdir()] == ["limited.spec"]


def test_too_much_memory_is_explained_by_the_largest_buffers(built: Path, tmp_path: Path) -> None:
    status, message = compiled(built, STEP, tmp_path / "f.xla", peak_memory=20_000)
    assert status == 2
    head, sums, largest, *rows = message.splitlines()
    assert head.startswith("m.toml: functions.f.limits.t.peak_memory: step for cpu-avx2, batch = 32: peak memory ")
    assert head.endswith(" KiB is over the limit of 19.5 KiB")
    assert sums.startswith("  arguments 24.2 KiB, temporaries ")
    assert sums.endswith(" KiB (16.2 KiB of them in the memory of arguments)")
    assert largest == "  largest, on each device:"
    assert rows[0] == "   16.0 KiB  argument   params['w'] f32[64,64]"
    assert rows[1] == "   16.0 KiB  result     result[0]['w'] f32[64,64]"
    assert "    8.0 KiB  argument   x f32[32,64]" in rows
    assert any("  temporary  jit(step)/" in row for row in rows)
    assert len(rows) <= 8


def test_a_target_of_bazels_is_named(built: Path, tmp_path: Path) -> None:
    limits = {"flops": 1, "peak_memory": 20_000, "compile_time": 0.001}
    status, message = compiled(built, STEP, tmp_path / "f.xla", "--label", "//models:m.step", **limits)
    assert status == 2
    peak, arguments, *_, flops = message.splitlines()
    assert re.sub("memory .* is over", "memory PEAK is over", peak) == (
        "//models:m.step: peak memory PEAK is over the limit of 19.5 KiB (m.toml: functions.f.limits.t.peak_memory)"
    )
    assert arguments.startswith("  arguments 24.2 KiB, ")
    assert flops.startswith("//models:m.step: flops ")
    assert flops.endswith(" is over the limit of 1 (m.toml: functions.f.limits.t.flops)")


def test_the_name_of_a_target_changes_no_byte(built: Path, tmp_path: Path) -> None:
    given = {"compile_time": 0.001}
    status, message = compiled(built, STEP, tmp_path / "f.xla", "--label", "//models:m.step", **given)
    assert status == 0
    assert message.startswith("//models:m.step: warning: compiling took ")
    for ending in ("xla", "json"):
        assert (tmp_path / f"f.{ending}").read_bytes() == (built / f"{STEP}.{ending}").read_bytes()


def test_all_that_is_over_a_limit_is_reported_together(built: Path, tmp_path: Path) -> None:
    status, message = compiled(built, STEP, tmp_path / "f.xla", flops=1, executable_size=1000)
    assert status == 2
    assert [line.split(": ")[1] for line in message.splitlines()] == [
        "functions.f.limits.t.flops",
        "functions.f.limits.t.executable_size",
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [(FACTOR, "what lapack_ssyevd_ffi computes"), (SETTLE, "how often the loop jit(settle)/while turns")],
)
def test_an_unknown_figure_is_over_its_limit(built: Path, tmp_path: Path, name: str, reason: str) -> None:
    found = analysis_of(built, name)
    assert (found["flops"], found["bytes_accessed"], found["unknown"]) == ("unknown", "unknown", [reason])
    limits = {"flops": 10**15, "bytes_accessed": 10**15}
    status, message = compiled(built, name, tmp_path / "f.xla", **limits)
    assert status == 2
    write = "\n  leave the limit out, or write allow_unknown = true beside it\n"
    about = f"{name.split('.')[1]} for cpu-avx2"
    assert message == "".join(
        f"m.toml: functions.f.limits.t.{key}: {about}: {figure} is unknown: it depends on {reason}{write}"
        for key, figure in (("flops", "flops"), ("bytes_accessed", "bytes accessed"))
    )
    assert compiled(built, name, tmp_path / "f.xla", **limits, allow_unknown=True) == (0, "")
    assert (tmp_path / "f.xla").read_bytes() == (built / f"{name}.xla").read_bytes()


@pytest.mark.parametrize(
    ("limit", "key", "name"),
    [(5, "", "collectives"), ({"all-reduce": 5, "all-gather": 0}, ".all-reduce", "all-reduce")],
)
def test_exchanges_of_which_the_number_is_unknown(built: Path, tmp_path: Path, limit: Any, key: str, name: str) -> None:
    unknown = dict.fromkeys(("count", "bytes", "sent_bytes"), "unknown")
    assert analysis_of(built, EXCHANGE)["collectives"] == {"all-reduce": unknown}
    status, message = compiled(built, EXCHANGE, tmp_path / "f.xla", collectives=limit)
    assert (status, message.splitlines()[0]) == (
        2,
        f"m.toml: functions.f.limits.t.collectives{key}: exchange for cpu-avx2: {name} is unknown: it depends on how "
        "often the loop jit(exchange)/shard_map/while turns",
    )


def test_what_is_known_must_be_within_limits_where_unknown_is_allowed(built: Path, tmp_path: Path) -> None:
    status, message = compiled(built, FACTOR, tmp_path / "f.xla", flops=1, executable_size=1, allow_unknown=True)
    assert status == 2
    assert message.startswith("m.toml: functions.f.limits.t.executable_size: factor for cpu-avx2: size of ")


def test_compile_time_is_advice(built: Path, tmp_path: Path) -> None:
    status, message = compiled(built, STEP, tmp_path / "f.xla", compile_time=0.001)
    assert status == 0
    where, what = message.split(": warning: ")
    assert where == "m.toml: functions.f.limits.t.compile_time"
    assert what.startswith("compiling took ")
    assert what.endswith(" s, the limit is 0.001 s\n")
    for ending in ("xla", "json"):
        assert (tmp_path / f"f.{ending}").read_bytes() == (built / f"{STEP}.{ending}").read_bytes()


def test_limits_of_a_manifest_reach_the_compiler(built: Path, tmp_path: Path) -> None:
    table = '\n[functions.step.limits.cpu-avx2]\npeak_memory = "1KiB"\n'
    (tmp_path / "limited.py").write_text(MODEL)
    (tmp_path / "m.toml").write_text(MANIFEST + table)
    write_specs("m.toml", tmp_path, tmp_path)
    done = stagec(
        *("action", "compile", "--spec", tmp_path / f"{STEP}.spec", "--exported", built / "m.step.exported"),
        *("--output", tmp_path / "f.xla", "--description", tmp_path / "f.json"),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("m.toml: functions.step.limits.cpu-avx2.peak_memory: step for cpu-avx2, batch = 32: ")
    assert " is over the limit of 1.0 KiB\n" in done.stderr
    assert not (tmp_path / "f.xla").exists()


MESH = AbstractMesh((4,), ("d",), (jax.sharding.AxisType.Auto,))
ROWS, WHOLE = PartitionSpec("d"), PartitionSpec()
X = jax.ShapeDtypeStruct((64, 16), jnp.float32)
PART = 4 * 16 * 16
"""Bytes of the rows on one of four devices."""


def four(function: Any, out: PartitionSpec) -> Compiled:
    """Compile a function of the rows on each device."""
    split = jax.shard_map(function, mesh=MESH, in_specs=ROWS, out_specs=out, check_vma=False)
    jitted = jax.jit(split, in_shardings=NamedSharding(MESH, ROWS))
    exported = Exported.deserialize(jax.export.export(jitted, platforms=["cpu"])(X).serialize())
    return lower_exported(exported, "cpu", {}).compile()


@pytest.mark.parametrize(
    ("function", "out", "kind", "moved", "sent"),
    [
        (lambda x: lax.psum(x, "d"), WHOLE, "all-reduce", PART, 2 * PART * 3 // 4),
        (lambda x: lax.all_gather(x, "d"), WHOLE, "all-gather", 4 * PART, 3 * PART),
        (lambda x: lax.psum_scatter(x, "d", tiled=True), ROWS, "reduce-scatter", PART, PART * 3 // 4),
        (lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True), ROWS, "all-to-all", PART, PART * 3 // 4),
        (lambda x: lax.ppermute(x, "d", [(0, 1), (1, 2)]), ROWS, "collective-permute", PART, PART),
    ],
    ids=["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"],
)
def test_collectives_of_four_devices(function: Any, out: PartitionSpec, kind: str, moved: int, sent: int) -> None:
    once = {"count": 1, "bytes": moved, "sent_bytes": sent}
    assert four(function, out).description.analysis["collectives"] == {kind: once}


def test_collectives_in_a_loop_count_as_often_as_it_turns() -> None:
    def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return lax.psum(x, "d") / 4 + x, None

    found = four(lambda x: lax.scan(turn, x, None, length=10)[0], ROWS).description.analysis["collectives"]
    assert found == {"all-reduce": {"count": 10, "bytes": 10 * PART, "sent_bytes": 10 * 2 * PART * 3 // 4}}


def test_figures_are_those_of_one_device() -> None:
    found = four(lambda x: lax.psum(x * 2, "d") + lax.psum(x[:, :1], "d"), WHOLE).description.analysis
    assert found["argument_bytes"] == PART
    assert found["collectives"]["all-reduce"]["bytes"] == PART + PART // 16


def test_a_function_without_operations_has_none() -> None:
    exported = jax.export.export(jax.jit(lambda x: x.T), platforms=["cpu"])(X)
    found = lower_exported(Exported.deserialize(exported.serialize()), "cpu", {}).compile().description.analysis
    assert (found["flops"], found["bytes_accessed"]) == (0, 2 * 4 * 64 * 16)
