"""Programs of functions of arrays (docs/arrays.md), each written once for stagec and JAX: test_array_programs.py.

As a program, `python -m tests.conformance.array_programs BUNDLE`: calls what a bundle has of them, and compares the
results with those of `jax.jit` for the same CPU. It prints, for each program, what differs.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from compiler.extensions.arrays.tests.library import Library, jaxs, stagecs


@dataclass(frozen=True)
class ArrayProgram:
    """A function with arguments to call it on.

    function: of a `Library`, and of the arguments.
    args: pytrees of numpy arrays.
    tolerance: by how much results may differ from JAX's, relative to the largest; 0: not by a bit.
    why: what differs where the results do.
    derived: whether it has a gradient, in all of its arguments.
    mesh: sizes of the axes of the mesh that it runs on, by name; empty for one device.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    tolerance: float = 0
    why: str = ""
    derived: bool = False
    mesh: Mapping[str, int] | None = None


PROGRAMS: dict[str, ArrayProgram] = {}
RNG = np.random.default_rng(0)
LINE = {"d": 4}
HEADER = """\
[manifest]
name = "arrays"
version = "0"

[meshes.line]
axes = { d = 4 }
"""


def program(*args: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function in PROGRAMS, and put that of stagec in its place, which manifests name."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = ArrayProgram(function, args, **options)

        entry = bound(function, stagecs())
        entry.args = args  # type: ignore[attr-defined]
        return entry

    return enter


def bound(function: Callable[..., Any], of: Library) -> Callable[..., Any]:
    """Return the function of a library, under its name."""

    def call(*args: Any) -> Any:
        return function(of, *args)

    call.__name__ = call.__qualname__ = function.__name__
    return call


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.asarray(RNG.normal(size=shape), np.float32)


LAYERS = [{"w": f32(16, 16), "b": f32(16)} for _ in range(3)]
SQUARE = f32(6, 6)
DEFINITE = SQUARE @ SQUARE.T + 6 * np.eye(6, dtype=np.float32)
FUSED = "XLA fuses sums with other operations and adds in another order"


@program(LAYERS, f32(4, 16), derived=True)
def mlp(of: Library, layers: Any, x: Any) -> Any:
    for layer in layers:
        x = of.xp.tanh(x @ layer["w"] + layer["b"])
    return x


@program(f32(2, 5, 8), f32(2, 5, 8), f32(2, 5, 8), derived=True)
def attention(of: Library, q: Any, k: Any, v: Any) -> Any:
    scores = q @ of.xp.matrix_transpose(k) / q.shape[-1] ** 0.5
    mask = of.xp.tril(of.xp.ones(scores.shape[1:], dtype=bool))
    return of.nn.softmax(of.xp.where(mask, scores, -of.xp.inf), axis=-1) @ v


@program(f32(8), derived=True)
def scan(of: Library, x: Any) -> Any:
    def body(carry: Any, step: Any) -> Any:
        carry = of.xp.sin(carry) + step
        return carry, of.xp.sum(carry)

    return of.lax.scan(body, x, of.xp.arange(5.0))


@program(f32(8))
def while_loop(of: Library, x: Any) -> Any:
    return of.lax.while_loop(lambda v: of.xp.max(v) < 100, lambda v: v * 1.5 + 1, x)


@program(np.int32(5))
def nested_while(of: Library, n: Any) -> Any:
    def inner(i: Any) -> Any:
        return of.lax.fori_loop(0, i, lambda j, total: total + i * j, 0)

    return of.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] + inner(s[0])), (0, 0))


@program(f32(8), np.bool_(True))
def cond(of: Library, x: Any, flag: Any) -> Any:
    return of.lax.cond(flag, lambda v: v * 2, lambda v: v - 1, x)


@program(np.int32(2), f32(8))
def switch(of: Library, i: Any, x: Any) -> Any:
    return of.lax.switch(i, [of.xp.sin, of.xp.cos, of.xp.tanh], x)


@program(f32(3, 16), derived=True)
def fft(of: Library, x: Any) -> Any:
    return of.xp.fft.irfft(of.xp.fft.rfft(x) * 2)


@program(f32(2, 3, 8, 8), f32(4, 3, 3, 3), derived=True)
def conv(of: Library, x: Any, kernel: Any) -> Any:
    return of.lax.conv_general_dilated(x, kernel, (1, 2), "SAME")


@program(f32(5, 7))
def sort(of: Library, x: Any) -> Any:
    return of.xp.sort(x, axis=0), of.xp.argsort(x, axis=1), tuple(of.lax.top_k(x, 3))


@program(f32(8, 6), np.array([7, 3, 3, 0], np.int32))
def places(of: Library, x: Any, i: Any) -> Any:
    return x.at[i].add(1.0), x[i, ::2], of.xp.take(x, i, axis=0)


@program(np.uint32(7))
def rng(of: Library, seed: Any) -> Any:
    keys = of.random.split(of.random.key(seed), 4)
    return (
        of.random.normal(keys[0], (5,)),
        of.random.randint(keys[1], (4,), 0, 99),
        of.random.permutation(keys[2], 6),
        of.random.categorical(keys[3], of.xp.zeros((3, 4))),
    )


@program(DEFINITE, derived=True)
def cholesky(of: Library, a: Any) -> Any:
    return of.xp.linalg.cholesky(a)


@program(DEFINITE, derived=True)
def eigh(of: Library, a: Any) -> Any:
    return tuple(of.xp.linalg.eigh(a))


@program(SQUARE, derived=True)
def qr(of: Library, a: Any) -> Any:
    return tuple(of.xp.linalg.qr(a))


@program(SQUARE, derived=True)
def svd(of: Library, a: Any) -> Any:
    return tuple(of.xp.linalg.svd(a, full_matrices=False))


@program(DEFINITE, f32(6), derived=True)
def solve(of: Library, a: Any, b: Any) -> Any:
    return of.xp.linalg.solve(a, b)


@program(LAYERS, f32(4, 16), derived=True, tolerance=1e-6, why=FUSED)
def grad(of: Library, layers: Any, x: Any) -> Any:
    def loss(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = of.nn.gelu(x @ layer["w"] + layer["b"])
        return of.xp.mean(of.xp.tanh(x))

    return of.value_and_grad(loss)(layers, x)


@program(f32(8), derived=True)
def steered(of: Library, x: Any) -> Any:
    """`custom_vjp` and `checkpoint`."""

    @of.custom_vjp
    def cubed(x: Any) -> Any:
        return x**3

    cubed.defvjp(lambda x: (cubed(x), x), lambda x, g: (3 * x**2 * g,))  # type: ignore[attr-defined]
    return cubed(x) + of.checkpoint(lambda x: of.xp.sin(of.xp.cos(x)))(x)


@program(f32(8, 4), mesh=LINE)
def psum(of: Library, x: Any) -> Any:
    return of.shard_map(lambda v: of.lax.psum(v, "d"), in_specs=of.P("d"), out_specs=of.P())(x)


@program(
    np.arange(-4, 4).astype(ml_dtypes.int4),
    f32(8).astype(ml_dtypes.float8_e4m3fn),
    f32(8).astype(ml_dtypes.float8_e5m2),
    f32(4, 8).astype(ml_dtypes.bfloat16),
    f32(8).astype(np.float16),
)
def small_dtypes(of: Library, i: Any, a: Any, b: Any, x: Any, h: Any) -> Any:
    def to(x: Any, dtype: Any) -> Any:
        return of.xp.astype(x, dtype)

    eighths = to(to(a, np.float32) + to(b, np.float32), ml_dtypes.float8_e4m3fn)
    return to(to(i, np.int8) + 1, ml_dtypes.int4), eighths, x @ x.mT, of.xp.exp(h)


@program((f32(8) + 1j * f32(8)).astype(np.complex64))
def complexes(of: Library, z: Any) -> Any:
    return of.xp.real(z * of.xp.conj(z)) + of.xp.abs(of.xp.exp(z)), of.xp.sum(z)


@program(np.arange(-4, 4, dtype=np.int32), np.full(8, 3, np.int32), np.array([True, False] * 4))
def integers(of: Library, a: Any, b: Any, flags: Any) -> Any:
    return a // b, a % b, a << 2, ~b, flags & (a > 0), of.xp.where(flags, 1, 2), of.xp.sum(flags)


@program(np.zeros((0, 3), np.float32))
def zero_size(of: Library, x: Any) -> Any:
    return of.xp.sum(x, axis=0), of.xp.concat([x, x]), of.xp.sort(x, axis=0), x @ x.mT


@program(np.float32(3), np.int32(4))
def scalars(of: Library, x: Any, n: Any) -> Any:
    return x * 2 + n


@program({f"k{i:03}": f32(2) for i in range(200)}, derived=True)
def leaves_200(of: Library, tree: Any) -> Any:
    return {name: x * x + 1 for name, x in tree.items()}


@program({"a": [f32(2), (f32(3), None)], "b": {}}, f32(2), derived=True)
def nested_tree(of: Library, tree: Any, x: Any) -> Any:
    return {"same": tree, "sum": (tree["a"][0] + x, [None, of.xp.sum(tree["a"][1][0])])}


@program(f32(4, 9), derived=True, tolerance=1e-6, why=FUSED)
def reductions(of: Library, x: Any) -> Any:
    return of.xp.sum(x), of.xp.max(x, axis=0), of.lax.cumsum(x, 1), of.xp.prod(x), of.xp.var(x, axis=1)


@program(f32(64), derived=True)
def constant(of: Library, x: Any) -> Any:
    return of.xp.asarray(np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)) @ x


def manifest() -> str:
    """Return the manifest of all programs."""
    parts = [HEADER]
    for name, one in PROGRAMS.items():
        lines = [f"[functions.{name}]", f'entry = "{__name__}:{name}"', 'frontend = "arrays"']
        lines += [f'avals = "{__name__}:{name}.args"', 'targets = ["cpu-avx2"]']
        lines += ['mesh = "line"', 'in_shardings = ["P(d)"]'] if one.mesh else []
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def as_markdown() -> list[str]:
    """Return the part of docs/conformance.md about these programs."""
    exact = [name for name, one in PROGRAMS.items() if not one.tolerance]
    others = sorted({(one.tolerance, one.why) for one in PROGRAMS.values() if one.tolerance})
    return [
        "## Functions without JAX",
        "",
        f"[Functions of arrays](arrays.md) need no JAX. Each of {len(PROGRAMS)} programs is written once, with names",
        "that JAX and stagec both have. The tests trace, export, compile and bundle stagec's, load the bundle and call",
        "it, and compare the results with those of `jax.jit` for the same CPU:",
        "",
        f"- bit for bit: {', '.join(exact)};",
        *(f"- within {by:g} of the largest element, as {why}: {', '.join(_those_of(by, why))}." for by, why in others),
        "",
        "Gradients are in 64 bits. They are within 1e-10 of those of JAX, and within 1e-5 of finite differences, in",
        f"{', '.join(name for name, one in PROGRAMS.items() if one.derived)}.",
        "",
    ]


def _those_of(tolerance: float, why: str) -> list[str]:
    return [name for name, one in PROGRAMS.items() if (one.tolerance, one.why) == (tolerance, why)]


def main(bundle: str) -> None:
    """Compare what a bundle gives with what JAX does, for one CPU."""
    import jax

    import stagec
    from stagec.backends.cpu import compiler as cpu
    from tests.conformance.on_target import TARGET
    from tests.conformance.programs import mesh_of

    loaded, found = stagec.load(bundle, policy="executable_only"), {}
    for name, one in PROGRAMS.items():
        with jax.set_mesh(mesh_of(dict(one.mesh or {"x": 1}))), cpu.presented(TARGET):
            options = {"in_shardings": jax.P("d")} if one.mesh else {}
            compiled = jax.jit(bound(one.function, jaxs()), **options).lower(*one.args).compile()
        wanted = compiled(*one.args)
        found[name] = difference(loaded[name](*one.args), wanted, one.tolerance)
    print(json.dumps(found))


def difference(found: Any, wanted: Any, tolerance: float) -> str:
    """Say how results differ from JAX's; "" where they do not."""
    import jax

    (ours, structure), (theirs, other) = jax.tree.flatten(found), jax.tree.flatten(wanted)
    if structure != other:
        return f"{structure}, not {other}"
    for i, (a, b) in enumerate(zip(map(np.asarray, ours), map(np.asarray, theirs), strict=True)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"result {i}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        if a.tobytes() != b.tobytes():
            wide = np.complex128 if np.iscomplexobj(a) else np.float64
            by = np.abs(a.astype(wide) - b.astype(wide)).max() / np.abs(b.astype(wide)).max()
            if not by <= tolerance:
                return f"result {i} differs by {by:.1e} of the largest"
    return ""


if __name__ == "__main__":
    sys.modules["tests.conformance.array_programs"] = sys.modules[__name__]
    main(sys.argv[1])
