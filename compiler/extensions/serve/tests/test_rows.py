"""Which functions have independent rows, by proof: a table of them, and drawn ones that are also asked."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from jax import lax

import stagec
from stagec.stages import mlir
from stagec_serve.rows import Ending, _reshaped, why_dependent

N = 4
X = np.random.default_rng(0).standard_normal((N, 16)).astype(np.float32)
IMAGE = np.random.default_rng(1).standard_normal((N, 12, 12, 3)).astype(np.float32)
W = np.random.default_rng(2).standard_normal((16, 16)).astype(np.float32)
KERNEL = np.random.default_rng(3).standard_normal((3, 3, 3, 4)).astype(np.float32)


def ending(function: Any, *arguments: Any, inputs: Mapping[int, int] | None = None, rows: int = N) -> Ending | None:
    """Return what ends the proof for a function of JAX, whose results have rows first."""
    results = len(jax.tree.leaves(jax.eval_shape(function, *arguments)))
    buffer = io.BytesIO()
    jax.jit(function, keep_unused=True).lower(*arguments).compiler_ir("stablehlo").operation.write_bytecode(buffer)
    known = dict.fromkeys(range(len(arguments)), 0) if inputs is None else inputs
    return why_dependent(mlir.to_portable(buffer.getvalue()), rows, known, dict.fromkeys(range(results), 0))


def attention(x: Any) -> Any:
    x = x.reshape(N, 4, 4)
    q = (x @ W[:4, :4]).reshape(N, 4, 2, 2).transpose(0, 2, 1, 3)
    scores = jax.nn.softmax(q @ q.swapaxes(-1, -2) + jnp.where(jnp.tri(4), 0, -1e9), -1)
    return (scores @ q).transpose(0, 2, 1, 3).reshape(N, 16)


def positions(x: Any) -> Any:
    """A sequence's positions, in a matrix of the tokens of all rows."""
    tokens = jnp.broadcast_to(W[:4, :4], (N, 4, 4)).reshape(N * 4, 4)
    return ((x.reshape(N * 4, 4) + tokens) @ W[:4, :4]).reshape(N, 16)


def recurrent(x: Any) -> Any:
    def step(hidden: Any, column: Any) -> Any:
        hidden = jnp.tanh(hidden @ W + column[:, None])
        return hidden, hidden

    return lax.scan(step, jnp.zeros_like(x), x.T)[1].swapaxes(0, 1)


def convolved(image: Any) -> Any:
    return lax.conv_general_dilated(image, KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pooled(image: Any) -> Any:
    return lax.reduce_window(image, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def matrices(x: Any) -> Any:
    m = x.reshape(N, 4, 4)
    return m @ m.swapaxes(1, 2) + jnp.eye(4)


INDEPENDENT: dict[str, Callable[[Any], Any]] = {
    "a perceptron": lambda x: jax.nn.softmax(jnp.tanh(x @ W + W[0])),
    "attention": attention,
    "tokens as rows": positions,
    "a recurrent layer": recurrent,
    "layer norm": lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "an outer product": lambda x: jnp.einsum("bi,bj->bij", x, x),
    "an embedding": lambda x: jnp.asarray(W)[x[:, :3].astype(int)],
    "sorted": lambda x: jnp.sort(x, -1),
    "the median": lambda x: jnp.median(x, -1),
    "top k": lambda x: lax.top_k(x, 3),
    "taken along an axis": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
    "a sum along others": lambda x: jnp.cumsum(x, 1),
    "an element of each": jax.vmap(lambda row: row[jnp.argmax(row)]),
    "a slice of each": jax.vmap(lambda row: lax.dynamic_slice(row, (jnp.argmax(row),), (3,))),
    "an update of each": jax.vmap(lambda row: row.at[jnp.argmax(row)].set(0)),
    "a loop of each": jax.vmap(lambda row: lax.scan(lambda c, u: (c + u, c), 0.0, row)[1]),
    "keys of each": jax.vmap(lambda row: jax.random.normal(jax.random.key(row[0].astype(int)), (3,))),
    "one-hot": lambda x: jax.nn.one_hot(x.argmax(-1), 5),
    "a loop": lambda x: lax.fori_loop(0, 3, lambda i, y: y @ W, x),
    "a branch on weights": lambda x: lax.cond(W.sum() > 0, lambda y: y, lambda y: -y, x),
    "with ones beside": lambda x: jnp.concatenate([x, jnp.ones((N, 2))], 1),
    "nothing of its rows": lambda x: jnp.zeros((N, 2)),
    "complex numbers": lambda x: (jnp.fft.fft(x) * (1 + 2j)).real,
    "Fourier": lambda x: jnp.fft.fft(x).real,
    "Cholesky": lambda x: jnp.linalg.cholesky(matrices(x)),
    "solved": lambda x: jnp.linalg.solve(matrices(x), matrices(x)),
    "eigenvalues": lambda x: jnp.linalg.eigh(matrices(x)),
    "singular values": lambda x: jnp.linalg.svd(matrices(x)),
    "special functions": jax.scipy.special.gammaln,
}


def switched(x: Any) -> Any:
    """Mixture of experts in which an expert takes two rows."""
    chosen = jax.nn.one_hot(jnp.argmax(x @ W[:, :4], -1), 4)
    kept = (jnp.cumsum(chosen, 0) <= 2) * chosen
    return x * kept.sum(-1, keepdims=True)


JOINS, PLACE = "joins rows, or takes some of them", "gives a row what depends on its place"
DEPENDENT: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "experts with a capacity": (switched, "stablehlo.reduce_window", JOINS),
    "a scale of all": (lambda x: jnp.round(x / jnp.maximum(abs(x).max(), 1e-3)), "stablehlo.reduce", JOINS),
    "a check for NaN": (lambda x: jnp.where(jnp.isnan(x).any(), 0, x), "stablehlo.reduce", JOINS),
    "centred": (lambda x: x - x.mean(0), "stablehlo.reduce", JOINS),
    "a running sum": (lambda x: jnp.cumsum(x, 0), "stablehlo.reduce_window", JOINS),
    "its place": (lambda x: (x.reshape(N * 4, 4) + jnp.arange(N * 4)[:, None]).reshape(N, 16), "stablehlo.add", PLACE),
    "pairs": (lambda x: (x[:, None] - x[None]).sum(1), "stablehlo.subtract", "brings rows together with rows at an"),
    "products": (lambda x: x @ x.T, "stablehlo.dot_general", "brings rows together with rows at another place"),
    "an order of rows": (lambda x: jnp.sort(x, 0), "stablehlo.sort", JOINS),
    "turned": (lambda x: jnp.roll(x, 1, 0), "stablehlo.slice", JOINS),
    "reversed": (lambda x: x[::-1], "stablehlo.reverse", JOINS),
    "noise": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), "stablehlo.add", PLACE),
    "a while": (
        jax.vmap(lambda row: lax.while_loop(lambda y: y.sum() < 100, lambda y: y * 2 + 1, row)),
        "stablehlo.reduce",
        JOINS,
    ),
    "a branch": (lambda x: lax.cond(x.sum() > 0, lambda y: y, lambda y: -y, x), "stablehlo.reduce", JOINS),
    "transposed": (
        lambda x: x.reshape(2, N, 8).swapaxes(0, 1).reshape(N, 16),
        "stablehlo.reshape",
        "puts parts of several rows into one dimension",
    ),
    "the first row": (lambda x: x + x[0], "stablehlo.slice", JOINS),
    "row by row": (lambda x: lax.map(lambda row: row * 2, x), "stablehlo.dynamic_slice", JOINS),
    "sums of segments": (lambda x: jax.ops.segment_sum(x, x[:, 0].astype(int), N), "stablehlo.scatter", JOINS),
    "rows that an index names": (lambda x: x[x[:, 0].astype(int) % N], "stablehlo.gather", ""),
    "columns": (lambda x: x[:, :N].T, "func.return", "has its rows along another dimension"),
    "kernels of groups": (
        lambda x: lax.conv_general_dilated(W[None, :N], x.reshape(N, 1, 16), (1,), "SAME", feature_group_count=N)[0],
        "stablehlo.convolution",
        JOINS,
    ),
    "the host": (
        lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        "stablehlo.custom_call",
        "which may do anything to rows",
    ),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent(name: str) -> None:
    assert ending(INDEPENDENT[name], X) is None


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent(name: str) -> None:
    function, operation, what = DEPENDENT[name]
    found = ending(function, X)
    assert found is not None
    assert (found.operation, what in found.what) == (operation, True), found


ZOO = {
    **dict.fromkeys(("attention", "halves", "mlp", "pooled", "sharded", "turned", "typed", "update"), ""),
    "effectful": f"stablehlo.reduce (f32) {JOINS}",
    "factorize": "stablehlo.dot_general (5x5xf32) brings rows together with rows at another place",
    "fourier": f"stablehlo.fft (16xcomplex<f32>) {JOINS}",
    "loop": f"stablehlo.slice (1xf32) {JOINS}",
    "precise": f"stablehlo.dot_general (8x8xf32) {JOINS}",
}
"""What ends the proof for each function of the zoo, where rows are along the first dimension of its last array."""


@pytest.mark.pinned
def test_the_zoo(zoo: Path) -> None:
    reasons: dict[str, str] = {}
    with stagec.load(zoo) as bundle:
        for function in (each for of in bundle.values() for each in of.variants.values() or [of]):
            usage = function.usage
            rows = [aval.shape[0] for aval in usage.in_avals if aval.shape][-1:]
            inputs = {i for i, aval in enumerate(usage.in_avals) if [*aval.shape[:1]] == rows}
            outputs = {i: 0 for i, aval in enumerate(usage.out_avals) if [*aval.shape[:1]] == rows}
            offers = [each.offer for each in function.select().candidates if each.offer.kind == "executable"]
            variant, _ = function.chosen({})
            module, parameters = variant.module(offers[-1])
            count = max((offers[-1].shapes[i][0] for i in inputs), default=0)
            if count > 1 and outputs:
                known = {number: 0 for number, leaf in enumerate(parameters) if leaf in inputs}
                reasons[function.name] = str(why_dependent(module, count, known, outputs) or "")
    assert reasons == ZOO


def test_images() -> None:
    assert ending(lambda image: pooled(convolved(image)), IMAGE) is None
    assert ending(jax.grad(lambda image: (convolved(image) ** 2).sum()), IMAGE) is None
    assert ending(jax.grad(lambda image: pooled(image).sum()), IMAGE) is None


def test_an_input_without_rows_may_not_tell_them_apart() -> None:
    assert ending(lambda x, w: x @ w, X, W, inputs={0: 0}) is None
    found = ending(lambda x, y: x + y, X, X, inputs={0: 0})
    assert found is not None
    assert str(found) == f"stablehlo.add ({N}x16xf32) gives a row what depends on its place"
    assert ending(lambda x, y: x + y, X, X) is None


def test_what_no_result_needs_is_no_matter() -> None:
    assert ending(lambda x: lax.optimization_barrier((x * 2, x.sum()))[0], X) is None


def test_rows_are_found_again_in_a_loop_that_mixes_them_late() -> None:
    """The first turn of the loop does no harm: what it leaves to the second does."""

    def late(x: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            return carry[1], x.sum() + jnp.zeros_like(x)

        return lax.fori_loop(0, 5, body, (x, x))[0]

    assert ending(late, X) is not None
    assert ending(lambda x: lax.fori_loop(0, 5, lambda _, c: (c[1], c[0]), (x, 2 * x))[0], X) is None


def test_no_module() -> None:
    with pytest.raises(ValueError, match="not a StableHLO portable artifact"):
        why_dependent(b"x", 2, {}, {})


SIZES = st.lists(st.integers(0, 4), min_size=0, max_size=3)


@given(SIZES, st.data())
def test_periods_of_a_reshaped_array(before: list[int], data: st.DataObject) -> None:
    """Each element of a reshaped array is the one that its periods name; an array of the same shape keeps them."""
    periods = [data.draw(st.integers(1, max(size, 1))) for size in before]
    merged = data.draw(st.integers(0, max(len(before) - 1, 0)))
    after = [*before[:merged], int(np.prod(before[merged : merged + 2])), *before[merged + 2 :]]
    at = np.indices(before)
    array = np.zeros(before, int)
    for index, period in zip(at, periods, strict=True):
        array = array * 5 + index % period
    for shapes in ((before, after), (after, before)):
        array = array.reshape(shapes[0])
        known = periods if shapes[0] is before else _reshaped(periods, before, after)
        found = _reshaped(known, *shapes)
        reshaped = array.reshape(shapes[1])
        assert len(found) == len(shapes[1])
        for dim, period in enumerate(found):
            size = shapes[1][dim]
            assert size == 0 or 1 <= period <= size
            assert (reshaped == reshaped.take(np.arange(size) % period, dim)).all()
    if 0 not in before and all(size % period == 0 for size, period in zip(before, periods, strict=True)):
        assert _reshaped(_reshaped(periods, before, before), before, before) == tuple(periods)


Step = tuple[str, bool, Callable[[Any], Any]]
KEEPS: Sequence[Step] = [  # name, whether it keeps rows apart, what it does to [N, 4]
    ("tanh", True, jnp.tanh),
    ("dense", True, lambda y: y @ W[:4, :4] + W[0, :4]),
    ("softmax", True, jax.nn.softmax),
    ("sort", True, lambda y: jnp.sort(y, 1)),
    ("reversed", True, lambda y: y[:, ::-1]),
    ("running", True, lambda y: jnp.cumsum(y, 1)),
    ("twice", True, lambda y: jnp.concatenate([y, y], 1) @ W[:8, :4]),
    ("tokens", True, lambda y: (y.reshape(N * 2, 2) @ W[:2, :2] + jnp.arange(2)).reshape(N, 4)),
    ("turned", True, lambda y: (W[:4, :4] @ y.T).T),
    ("heads", True, lambda y: jnp.einsum("bhi,bhj->bij", y.reshape(N, 2, 2), y.reshape(N, 2, 2)).reshape(N, 4)),
    ("picked", True, lambda y: jnp.take_along_axis(y, jnp.argsort(y, 1), 1)),
    ("padded", True, lambda y: jnp.pad(y, ((0, 0), (1, 0)))[:, :4]),
    ("loop", True, lambda y: lax.fori_loop(0, 2, lambda i, z: z * 0.5 + i, y)),
    ("set", True, jax.vmap(lambda row: row.at[jnp.argmax(row)].set(-1))),
    ("windows", True, lambda y: lax.reduce_window(y, 0.0, lax.add, (1, 2), (1, 1), "SAME")),
    ("pieces", True, lambda y: y.reshape(N, 2, 2).transpose(2, 0, 1).reshape(2, N * 2).T.reshape(N, 4)),
    ("largest", False, lambda y: y / jnp.maximum(abs(y).max(), 100)),
    ("capacity", False, lambda y: jnp.where(jnp.cumsum(y[:, :1] > 0, 0) <= N - 1, y, 0)),
    ("any NaN", False, lambda y: jnp.where(jnp.isnan(y).any(), 0, y)),
    ("any zero row", False, lambda y: jnp.where((y == 0).all(1).any(), y + 1, y)),
    ("equal rows", False, lambda y: jnp.where((y[:, None] == y[None]).all(2).sum(1, keepdims=True) > 1, -y, y)),
    ("shuffled", False, lambda y: y[jnp.argsort(y[:, 0])]),
    ("place", False, lambda y: y + jnp.arange(N)[:, None]),
    ("first", False, lambda y: y + 0 * y[:1]),
    ("regrouped", False, lambda y: y.reshape(2, N, 2).swapaxes(0, 1).reshape(N, 4)),
    ("branch", False, lambda y: lax.cond(y.max() > 1e4, lambda z: -z, lambda z: z, y)),
    ("halves", False, lambda y: jnp.concatenate([y[N // 2 :], y[: N // 2]])),
    ("windows of rows", False, lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME")),
]


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(KEEPS), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_drawn_functions(steps: list[Step], seed: int) -> None:
    """What is proven, rows that are equal, huge, NaN and zero do not disprove; and what keeps rows apart is proven."""

    def function(y: Any) -> Any:
        for _, _, step in steps:
            y = step(y)
        return y

    names = [name for name, _, _ in steps]
    x = np.random.default_rng(seed).standard_normal((N, 4)).astype(np.float32)
    proven = ending(function, x) is None
    assert proven == all(keeps for _, keeps, _ in steps), names
    if not proven:
        return
    compiled = jax.jit(function).lower(x).compile()
    wanted = np.asarray(compiled(x))
    for value in (x[0], 3e38, np.nan, 0, -x[0], 1):
        for place in range(N):
            other = np.empty_like(x)
            other[:] = value
            other[place] = x[place]
            assert np.asarray(compiled(other))[place].tobytes() == wanted[place].tobytes(), (names, value, place)
