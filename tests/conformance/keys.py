"""The manifest's keys: what each is written as in a manifest, and the same in calls of JAX.

From the manifest stagec's pipeline builds an artifact that JAX reads; from the calls JAX writes one that stagec reads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from tests.conformance import models
from tests.conformance.programs import GRID, split
from tests.zoo import nodes, zoo


@dataclass(frozen=True)
class Key:
    """A function of a manifest.

    name: of the key, for a reader.
    function: what is built.
    manifest: the lines of `[functions.NAME]`, but for `entry`; "" ends them.
    args, kwargs: for JAX; avals, and the values of static parameters.
    jit, export: arguments of `jax.jit` and `jax.export.export`.
    sizes: of the dimensions, for each call.
    module: how far the modules of both artifacts are equal: "bytes", or "text" without names of arguments.
    variant: which one of the manifest's it is.
    stablehlo: the entry is this file, which has JAX's StableHLO of the function.
    """

    name: str
    function: Callable[..., Any]
    manifest: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    jit: Mapping[str, Any] = field(default_factory=dict)
    export: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[Mapping[str, int], ...] = ({},)
    vjp_order: int = 0
    enable_x64: bool = False
    matmul_precision: str | None = None
    prng_impl: str = "threefry2x32"
    mesh: Mapping[str, int] = field(default_factory=dict)
    module: str = "bytes"
    variant: str = ""
    stablehlo: str = ""


def f32(*shape: int, dtype: Any = "float32", weak_type: bool = False) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)


def symbolic(*shapes: str, constraints: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Avals whose dimensions are of one scope."""
    scope = jax.export.SymbolicScope(constraints)
    return tuple(jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), jnp.float32) for shape in shapes)


def key_and_vector(implementation: str) -> tuple[Any, ...]:
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)), f32(3)


def grid(*spec: str | None) -> jax.sharding.NamedSharding:
    return split(GRID, *spec)


def typed(name: str, function: Callable[..., Any], avals: Callable[[], tuple[Any, ...]]) -> Key:
    """A function whose arguments are of types of the model's own."""
    return Key(f"avals: {name}", function, f'avals = "{avals.__module__}:{avals.__name__}"', avals())


check = jax.export.DisabledSafetyCheck
VECTORS = 'args = ["f32[4]", "f32[4]"]'
LEARNED = 'args = [{ w = "f32[16,4]", b = "f32[4]" }, "f32[4,16]"]'


LEARNED_AVALS = {"w": f32(16, 4), "b": f32(4)}, f32(4, 16)


def keys() -> tuple[Key, ...]:
    """Return the table. It makes meshes of JAX's devices."""
    return (
        *(
            Key(
                f"static, variants.{name}",
                zoo.named,
                'args = ["f32[3]", "f32[7]"]\nkwargs = { shift = "f32[]" }\n'
                f"variants.{name} = {{ static = {{ power = {power} }} }}",
                (f32(3), f32(7)),
                {"shift": f32(), "power": power},
                {"static_argnames": "power"},
                module="text",  # the frontend binds the values, and JAX sees no names then
                variant=name,
            )
            for name, power in (("square", 2), ("cube", 3))
        ),
        Key(
            "donate_argnums",
            models.summed,
            f"{VECTORS}\ndonate_argnums = [0]",
            (f32(4), f32(4)),
            jit={"donate_argnums": 0},
        ),
        Key(
            "donate_argnames",
            models.summed,
            f'{VECTORS}\ndonate_argnames = ["y"]',
            (f32(4), f32(4)),
            jit={"donate_argnames": "y"},
        ),
        *(
            Key(
                f"keep_unused = {str(keep).lower()}",
                models.scaled,
                f'args = ["f32[2]", "i32[3]"]\nkwargs = {{ scale = "f32[]" }}\nkeep_unused = {str(keep).lower()}',
                (f32(2), f32(3, dtype="int32")),
                {"scale": f32()},
                {"keep_unused": keep},
            )
            for keep in (False, True)
        ),
        Key("inline", models.summed, f"{VECTORS}\ninline = true", (f32(4), f32(4)), jit={"inline": True}),
        Key(
            "kwargs",
            models.scaled,
            'args = ["f32[2]"]\nkwargs = { scale = "f32[2]" }',
            (f32(2),),
            {"scale": f32(2)},
        ),
        Key(
            "kwargs: a weak type",
            models.scaled,
            'args = ["bf16[2]"]\nkwargs = { scale = "~f32[]" }',
            (f32(2, dtype="bfloat16"),),
            {"scale": f32(weak_type=True)},
        ),
        *(
            Key(
                f"args: a PRNG key, {name}",
                models.drawn,
                f'args = ["key<{short}>[]", "f32[3]"]',
                key_and_vector(name),
            )
            for short, name in (("fry", "threefry2x32"), ("rbg", "rbg"), ("urbg", "unsafe_rbg"))
        ),
        Key(
            "mesh, in_shardings, out_shardings",
            models.sharded,
            'args = [{ w = "f32[6,4]", b = "f32[4]" }, "f32[8,6]"]\nmesh = "grid"\n'
            'in_shardings = [{ w = "P(None, model)", b = "P(model)" }, "P(data)"]\n'
            'out_shardings = { total = "P()", y = "P(data)" }',
            ({"w": f32(6, 4), "b": f32(4)}, f32(8, 6)),
            jit={
                "in_shardings": ({"w": grid(None, "model"), "b": grid("model")}, grid("data")),
                "out_shardings": {"total": grid(), "y": grid("data")},
            },
            mesh=GRID,
        ),
        *(
            Key(f"vjp_order = {n}", zoo.mlp, f"{LEARNED}\nvjp_order = {n}", LEARNED_AVALS, vjp_order=n)
            for n in (0, 1, 2)
        ),
        Key(
            "vjp_order = 1: symbolic dimensions",
            zoo.mlp,
            'args = [{ w = "f32[16,4]", b = "f32[4]" }, "f32[batch,16]"]\nvjp_order = 1',
            ({"w": f32(16, 4), "b": f32(4)}, *symbolic("batch, 16")),
            sizes=({"batch": 3},),
            vjp_order=1,
        ),
        Key(
            "disabled_checks: platform",
            models.cubed,
            'args = ["f32[4]"]\nplatforms = ["tpu"]\ndisabled_checks = ["platform"]',
            (f32(4),),
            export={"platforms": ["tpu"], "disabled_checks": [check.platform()]},
        ),
        Key(
            "platforms: cpu, tpu, cuda",
            zoo.mlp,
            f'{LEARNED}\nplatforms = ["cpu", "tpu", "cuda"]',
            LEARNED_AVALS,
            export={"platforms": ["cpu", "tpu", "cuda"]},
        ),
        Key(
            "constraints",
            models.padded,
            'args = ["f32[batch]", "f32[seq]"]\nconstraints = ["batch % 8 == 0", "seq <= 4096"]',
            symbolic("batch", "seq", constraints=("mod(batch,8) == 0", "seq <= 4096")),
            sizes=({"batch": 8, "seq": 3}, {"batch": 32, "seq": 1}),
        ),
        Key(
            "buckets",
            models.mean,
            'args = ["f32[batch,3]"]\ntargets = ["cpu"]\nbuckets = { batch = [2, 5] }',
            symbolic("batch, 3"),
            sizes=({"batch": 2}, {"batch": 5}),
        ),
        *(
            Key(
                f"enable_x64 = {str(wide).lower()}",
                models.counted,
                f'args = ["f{64 if wide else 32}[]"]\nenable_x64 = {str(wide).lower()}',
                (f32(dtype="float64" if wide else "float32"),),
                enable_x64=wide,
            )
            for wide in (False, True)
        ),
        *(
            Key(
                f"matmul_precision = {precision}",
                zoo.precise,
                f'args = ["f32[8,8]"]\nmatmul_precision = "{precision}"',
                (f32(8, 8),),
                matmul_precision=precision,
            )
            for precision in ("highest", "BF16_BF16_F32_X3")
        ),
        *(
            Key(
                f"prng_impl = {name}",
                models.seeded,
                f'args = ["u32[]"]\nprng_impl = "{name}"',
                (f32(dtype="uint32"),),
                prng_impl=name,
            )
            for name in ("threefry2x32", "rbg", "unsafe_rbg")
        ),
        Key(
            "custom calls of LAPACK, guaranteed",
            jnp.linalg.cholesky,
            'args = ["f32[3,3]"]',
            (f32(3, 3),),
        ),
        Key(
            "allow_custom_calls: of LAPACK, not guaranteed",
            models.pivoted,
            'args = ["f32[4,3]"]\nallow_custom_calls = ["lapack_sgeqp3_ffi"]',
            (f32(4, 3),),
            export={"disabled_checks": [check.custom_call("lapack_sgeqp3_ffi")]},
        ),
        typed("a dataclass with namedtuples", zoo.typed, zoo.typed_avals),
        typed("registered nodes", nodes.turned, nodes.turned_avals),
        typed("a flax module", models.struct, models.struct_avals),
        typed("an equinox module", models.module, models.module_avals),
        Key(
            "effects, ordered and unordered",
            models.effectful,
            'args = ["f32[4]", "f32[3]"]\ndonate_argnames = ["state"]',
            (f32(4), f32(3)),
            jit={"donate_argnames": "state"},
        ),
        *(
            Key(
                f"entry: a StableHLO file, {file.rpartition('.')[2]}",
                zoo.attention,
                "",
                (f32(2, 5, 8),),
                module="text",
                stablehlo=file,
            )
            for file in ("attention.mlir", "attention.mlirbc")
        ),
    )


HEADER = """\
[manifest]
name = "keys"
version = "0"

[targets.cpu]
platform = "cpu"
isa = "AVX2"
parallelism = 1

[meshes.grid]
axes = { data = 2, model = 2 }
"""


def manifest(keys: Sequence[Key]) -> str:
    """Return a manifest of all `keys`, whatever their settings, called `f0`, `f1` ... by their place."""
    parts = [HEADER]
    for number, key in enumerate(keys):
        entry = key.stablehlo or f"{key.function.__module__}:{key.function.__name__}"
        lines = [f"[functions.f{number}]", f'entry = "{entry}"', key.manifest]
        if "platforms" not in key.manifest:
            lines.append('platforms = ["cpu"]')
        if key.enable_x64 and "enable_x64" not in key.manifest:
            lines.append("enable_x64 = true")
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def as_markdown() -> list[str]:
    """Return the part of docs/conformance.md about the keys."""
    return [
        "## Keys of a manifest",
        "",
        "For each key, the tests build an artifact from a manifest, and write another one with `jax.export` from",
        "the same function and the same settings. JAX calls the first; stagec calls and compiles the second. The",
        "results are those of `jax.jit`, bit for bit, also for vector-Jacobian products. Every field of the two",
        "artifacts is equal. Of the module, the bytes are equal; if names of arguments differ, the text without",
        "these names.",
        "",
        "| key | in the manifest | module |",
        "| --- | --- | --- |",
        *(
            f"| {key.name} | {', '.join(f'`{line}`' for line in key.manifest.splitlines())} | {key.module} |"
            for key in keys()
        ),
        "",
    ]
