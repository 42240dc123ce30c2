"""Callbacks into Python, wherever they are in a function: the message has the line of each."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import equinox
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import buffer_callback, checkify, io_callback, pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

import stagec

HERE = Path(__file__)
X = np.ones((2, 3), np.float32)
LIKE = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def pure(x: Any) -> Any:
    return jax.pure_callback(lambda a: a, LIKE, x)  # here


def ordered(x: Any) -> Any:
    io_callback(lambda a: None, None, x, ordered=True)  # ordered
    return x


def printed(x: Any) -> Any:
    jax.debug.print("{}", x)  # print
    return x


@jax.custom_jvp
def custom_jvp(x: Any) -> Any:
    return pure(x)


custom_jvp.defjvp(lambda primals, tangents: (custom_jvp(*primals), tangents[0]))


@jax.custom_vjp
def custom_vjp(x: Any) -> Any:
    return pure(x)


custom_vjp.defvjp(lambda x: (custom_vjp(x), None), lambda _, g: (g,))


@jax.custom_batching.custom_vmap
def custom_vmap(x: Any) -> Any:
    return pure(x)


@custom_vmap.def_vmap
def _(size: int, batched: Any, x: Any) -> Any:
    return x, True


@custom_partitioning
def partitioned(x: Any) -> Any:
    return pure(x)


partitioned.def_partition(
    partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule="i j -> i j"
)

hidden = eqxi.create_vprim(
    "hidden", eqxi.filter_primitive_def(pure), eqxi.filter_primitive_def(lambda x: x), None, None
)
"""As lineax makes its solves: no jaxpr shows what this becomes."""


def solve(x: Any) -> Any:
    return eqxi.filter_primitive_bind(hidden, x)


def kernel(x: Any, y: Any) -> None:
    jax.debug.print("{}", x[0, 0])  # kernel
    y[...] = x[...] * 2


def checked(x: Any) -> Any:
    def function(x: Any) -> Any:
        checkify.check(x.sum() > 0, "too small")
        return pure(x)

    return checkify.checkify(function)(x)[1]


def shard_map(x: Any) -> Any:
    mesh = jax.sharding.AbstractMesh((1,), ("d",))
    return jax.shard_map(pure, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)(x)


CALLS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "itself": (pure, "pure_callback", "here"),
    "buffer_callback": (
        lambda x: buffer_callback.buffer_callback(lambda *_: None, LIKE)(x + 1),  # buffer
        "buffer_callback",
        "buffer",
    ),
    "debug.callback": (lambda x: (jax.debug.callback(lambda a: None, x), x)[1], "debug_callback", '"debug.callback"'),
    "inspect": (
        lambda x: (jax.debug.inspect_array_sharding(x, callback=lambda _: None), x)[1],  # inspect
        "inspect_sharding",
        "inspect",
    ),
    "jit": (jax.jit(pure), "pure_callback", "here"),
    "jit in jit": (jax.jit(lambda x: jax.jit(printed)(x) * 2), "debug_print", "print"),
    "ordered in jit": (jax.jit(ordered), "io_callback", "ordered"),
    "scan": (lambda x: lax.scan(lambda c, _: (pure(c), None), x, None, 2)[0], "pure_callback", "here"),
    "ordered in scan": (lambda x: lax.scan(lambda c, _: (ordered(c), None), x, None, 2)[0], "io_callback", "ordered"),
    "while": (lambda x: lax.while_loop(lambda c: c.sum() < 3, pure, x), "pure_callback", "here"),
    "condition of while": (
        lambda x: lax.while_loop(lambda c: pure(c).sum() < 3, lambda c: c + 1, x),
        "pure_callback",
        "here",
    ),
    "cond": (lambda x: lax.cond(x.sum() > 0, pure, lambda x: x, x), "pure_callback", "here"),
    "platform_dependent": (
        lambda x: lax.platform_dependent(x, cpu=pure, default=lambda x: x),
        "pure_callback",
        "here",
    ),
    "checkpoint": (jax.checkpoint(pure), "pure_callback", "here"),
    "custom_jvp": (custom_jvp, "pure_callback", "here"),
    "custom_vjp": (custom_vjp, "pure_callback", "here"),
    "custom_vmap": (custom_vmap, "pure_callback", "here"),
    "custom_linear_solve": (
        lambda x: lax.custom_linear_solve(pure, x, lambda matvec, b: matvec(b)),
        "pure_callback",
        "here",
    ),
    "custom_partitioning": (partitioned, "pure_callback", "here"),
    "linear_call": (
        lambda x: jax.custom_derivatives.linear_call(lambda _, x: pure(x), lambda _, x: x, (), x),
        "pure_callback",
        "here",
    ),
    "shard_map": (shard_map, "pure_callback", "here"),
    "composite": (lax.composite(pure, "my.pure"), "pure_callback", "here"),
    "ordered in composite": (lax.composite(ordered, "my.ordered"), "io_callback", "ordered"),
    "checkify": (checked, "pure_callback", "here"),
    "reduce": (
        lambda x: lax.reduce(x, np.float32(0), lambda a, b: jax.pure_callback(np.add, a, a, b), (0,)),  # reduce
        "pure_callback",
        "reduce",
    ),
    "pallas": (pl.pallas_call(kernel, LIKE, interpret=True), "debug_print", "kernel"),
    "a primitive of a library": (jax.jit(solve), "hidden", "here"),
}


def line(mark: str) -> str:
    """The line of this file that ends in a comment, or starts with a key."""
    lines = HERE.read_text("utf-8").splitlines()
    found = [i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}") or text.strip().startswith(f"{mark}:")]
    assert len(found) == 1, mark
    return f"{HERE.name}:{found[0]}"


@pytest.mark.parametrize("stage", ["lower", "export"])
@pytest.mark.parametrize("name", CALLS)
def test_the_line_of_a_callback_is_told(name: str, stage: str) -> None:
    function, primitive, mark = CALLS[name]
    traced = stagec.jit(lambda x: function(x) + 1).trace(X)
    stages: dict[str, Callable[[], Any]] = {
        "lower": traced.lower,
        "export": functools.partial(traced.export, ("cpu", "cuda")),
    }
    with pytest.raises(NotImplementedError) as error:
        stages[stage]()
    told = str(error.value).splitlines()
    assert told[0].rpartition("/")[2] == f"{line(mark)}: a host callback ({primitive}) cannot be built ahead of time"


def test_all_lines_are_told() -> None:
    def function(x: Any) -> Any:
        return jax.jit(solve)(printed(pure(x)))

    with pytest.raises(NotImplementedError) as error:
        stagec.jit(function)(X)
    told = [text.rpartition("/")[2] for text in str(error.value).splitlines() if not text.startswith(" ")]
    wanted = [("here", "pure_callback"), ("print", "debug_print"), ("here", "hidden")]
    assert told == [
        f"{line(mark)}: a host callback ({primitive}) cannot be built ahead of time" for mark, primitive in wanted
    ]


def check_of_a_library(x: Any) -> Any:
    return equinox.error_if(x, x.sum() > 0, "too large")  # library


lineax = eqxi.create_vprim(
    "linear_solve",
    eqxi.filter_primitive_def(check_of_a_library),
    eqxi.filter_primitive_def(lambda x: x),
    None,
    None,
)
OF_LIBRARIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "called": (check_of_a_library, "pure_callback"),
    "in jit": (jax.jit(check_of_a_library), "pure_callback"),
    "in vmap": (jax.vmap(check_of_a_library), "pure_callback"),
    "in scan": (
        lambda x: lax.scan(lambda c, _: (check_of_a_library(c), None), x, None, 2)[0],
        "pure_callback",
    ),
    "its gradient": (jax.grad(lambda x: (check_of_a_library(x) ** 2).sum()), "pure_callback"),
    "in a primitive, where no jaxpr shows it": (lambda x: eqxi.filter_primitive_bind(lineax, x), "linear_solve"),
}


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_the_library_is_told_and_the_line_that_led_to_it(name: str) -> None:
    function, primitive = OF_LIBRARIES[name]
    with pytest.raises(NotImplementedError) as error:
        stagec.jit(lambda x: function(x) + 1).lower(X)
    told = re.sub(r"(?<=\(equinox/)\w+\.py:[0-9]+", "FILE", str(error.value)).rpartition(f"/{HERE.name}")
    assert "".join(told[1:]).removeprefix("/") == (
        f"{line('library')}: a host callback ({primitive}) of equinox {metadata.version('equinox')} "
        "(equinox/FILE) cannot be built ahead of time\n"
        '  set os.environ["EQX_ON_ERROR"] = "nan" before the library is imported: '
        'its checks then give NaN where they fail; with "off" it checks nothing\n'
        '  host_callbacks="drop" would not help: this callback has results'
    )


INSTALLED = """\
import equinox, jax, numpy, stagec

def printed(x):
    jax.debug.callback(lambda v: None, x)
    return x

def checked(x):
    return equinox.error_if(x, x.sum() > 0, "too large")

for _ in range(2):  # before and after the first message of the process
    for function in (printed, checked, lambda x: jax.jit(checked)(x) + 1):
        try:
            stagec.jit(function)(numpy.ones(3, numpy.float32))
        except NotImplementedError as error:
            print(error)
"""


def test_stagec_itself_is_no_library_that_calls_back(tmp_path: Path) -> None:
    """It is in the folder of packages, as pip installs it, and its frames are in each call stack that JAX keeps."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "stagec").symlink_to(Path(stagec.__file__).parent)
    (tmp_path / "model.py").write_text(INSTALLED)
    path = os.pathsep.join([str(tmp_path / "site-packages"), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "model.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    drop = '  write host_callbacks="drop" to build the function without it, or take it out\n'
    version = f"equinox {metadata.version('equinox')}"
    told = re.sub(r"(?<=\(equinox/)\w+\.py:[0-9]+", "FILE", done.stdout)
    of_equinox = [text.partition("(equinox/FILE)")[0] for text in told.splitlines() if "equinox" in text]
    assert of_equinox == [f"model.py:8: a host callback (pure_callback) of {version} "] * 4
    assert told.count('  set os.environ["EQX_ON_ERROR"] = "nan"') == 4
    assert told.count(f"model.py:4: a host callback (debug_callback) cannot be built ahead of time\n{drop}") == 2
    assert "stagec" not in told


def says(x: Any, *, aloud: bool) -> Any:
    if aloud:
        jax.debug.print("{}", x.sum(), ordered=True)
        jax.debug.callback(lambda a: None, x * 7)
        io_callback(lambda a: None, None, x, ordered=True)
        buffer_callback.buffer_callback(lambda *_: None, (), has_side_effect=True)(x)
        jax.debug.inspect_array_sharding(x, callback=lambda sharding: None)
    return jnp.tanh(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def backward(x: Any, aloud: bool) -> Any:
    return x * 2


backward.defvjp(lambda x, aloud: (x, x), lambda aloud, x, g: (says(g, aloud=aloud),))

IN: dict[str, Callable[[Any, bool], Any]] = {
    "itself": lambda x, aloud: says(x, aloud=aloud),
    "jit": lambda x, aloud: jax.jit(says, static_argnames="aloud")(x, aloud=aloud),
    "scan": lambda x, aloud: lax.scan(lambda c, _: (says(c, aloud=aloud), None), x, None, 2)[0],
    "while": lambda x, aloud: lax.while_loop(lambda c: c.sum() < 3, lambda c: says(c, aloud=aloud), x),
    "cond": lambda x, aloud: lax.cond(x.sum() > 0, functools.partial(says, aloud=aloud), lambda x: x, x),
    "checkpoint": lambda x, aloud: jax.grad(lambda x: jax.checkpoint(lambda x: says(x, aloud=aloud))(x).sum())(x),
    "custom_vjp": lambda x, aloud: jax.grad(lambda x: backward(x, aloud).sum())(x),
    "a primitive of a library": lambda x, aloud: eqxi.filter_primitive_bind(quiet[aloud], x),
    "pallas": lambda x, aloud: pl.pallas_call(functools.partial(saying, aloud), LIKE, interpret=True)(x),
}
quiet = {
    aloud: eqxi.create_vprim(
        "hidden",
        eqxi.filter_primitive_def(functools.partial(says, aloud=aloud)),
        eqxi.filter_primitive_def(lambda x: x),
        None,
        None,
    )
    for aloud in (False, True)
}


def saying(aloud: bool, x: Any, y: Any) -> None:
    if aloud:
        jax.debug.print("{}", x[0, 0])
    y[...] = x[...] * 2


@pytest.fixture
def without_locations() -> Iterator[None]:
    """Modules as the export action has them."""
    before: int = getattr(jax.config, "jax_traceback_in_locations_limit")  # noqa: B009 - JAX's types have it not
    jax.config.update("jax_traceback_in_locations_limit", 0)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


@pytest.mark.parametrize("name", IN)
@pytest.mark.usefixtures("without_locations")
def test_dropped_callbacks_leave_nothing_behind(name: str) -> None:
    """The bytes are those of a function without them."""

    def function(x: Any, aloud: bool) -> Any:
        return IN[name](x, aloud)

    def artifact(aloud: bool) -> bytes:
        traced = stagec.jit(function, static_argnames="aloud", host_callbacks="drop").trace(X, aloud=aloud)
        assert "InspectSharding" not in traced.lower().as_text()
        return traced.export(("cpu", "tpu")).mlir_module_serialized

    assert artifact(aloud=True) == artifact(aloud=False)


def test_a_function_that_is_shared_keeps_its_callbacks_elsewhere() -> None:
    """JAX keeps what it traced of a function under `jit`: not what it traced without callbacks, for other callers."""
    shared = jax.jit(printed)
    assert not stagec.jit(lambda x: shared(x) + 1, host_callbacks="drop").trace(X).jaxpr.effects
    assert jax.jit(lambda x: shared(x) + 1).trace(X).jaxpr.effects
    assert not stagec.jit(lambda x: shared(x) + 2, host_callbacks="drop").trace(X).jaxpr.effects


def test_callbacks_with_results_are_never_dropped() -> None:
    with pytest.raises(NotImplementedError) as error:
        stagec.jit(lambda x: printed(pure(x)), host_callbacks="drop")(X)
    first, *rest = str(error.value).splitlines()
    assert first.rpartition("/")[2].startswith(f"{line('here')}: a host callback (pure_callback) cannot")
    assert rest == [
        "  take it out of the function; what it computes can be a result",
        '  host_callbacks="drop" would not help: this callback has results',
    ]


def test_a_dropped_callback_does_not_run() -> None:
    heard: list[Any] = []

    def function(x: Any) -> Any:
        jax.debug.callback(heard.append, x)
        return x + 1

    wrapped = stagec.jit(function, host_callbacks="drop")
    assert wrapped(X).sum() == 12
    assert jax.jit(lambda x: wrapped(x) * 1)(X).sum() == 12  # while JAX traces a caller, JAX's jit is called
    with jax.disable_jit():
        assert wrapped(X).sum() == 12
    jax.effects_barrier()
    assert not heard
    with pytest.raises(ValueError, match='host_callbacks is \'ignore\'; write "refuse" or "drop"'):
        stagec.jit(function, host_callbacks="ignore")


def test_another_error_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        stagec.jit(jax.ffi.ffi_call("unknown_call", LIKE)).trace(X).export()
