"""Functions that run what was built before anything is traced, and what keeps them from it: never a wrong result.

Modules: `frontends/jax/premises.py`, `frontends/jax/contexts.py`, `frontends/common/parameters.py`, `jax_warm.py`,
`jax.py`.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config

import stagec
import stagec.jax
from stagec import jax_warm
from stagec.frontends.jax import premises
from tests.building import COMPILER, ROOT, build

MANIFEST = """
[manifest]
name = "m"
version = "1"
[functions.predict]
entry = "warm_model:predict"
args = [{ w = "f32[6,3]", b = "f32[3]" }, "f32[batch,6]"]
targets = ["cpu-avx2"]
buckets = { batch = [2, 8] }
[functions.power]
entry = "warm_model:power"
args = ["f32[3]"]
targets = ["cpu-avx2"]
variants.square.static = { n = 2 }
variants.cube.static = { n = 3 }
[functions.step]
entry = "warm_model:step"
args = [{ w = "f32[6,3]", b = "f32[3]" }, "f32[8,6]"]
donate_argnums = [0]
targets = ["cpu-avx2"]
[functions.scaled]
entry = "warm_model:scaled"
args = ["f32[3]"]
targets = ["cpu-avx2"]
[functions.drawn]
entry = "warm_model:drawn"
args = ["key<fry>[]", "f32[3]"]
targets = ["cpu-avx2"]
[functions.counted]
entry = "warm_model:counted"
args = ["f32[3]"]
targets = ["cpu-avx2"]
[functions.locked]
entry = "warm_model:locked"
args = ["f32[3]"]
targets = ["cpu-avx2"]
"""
LAYERS = """\
import jax


class Options:
    bias = 1.0


def dense(params, x):
    return jax.nn.relu(x @ params["w"] + params["b"] * Options.bias)
"""
MODEL = """\
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np

import warm_layers

SCALE = 2.0
TABLE = np.arange(3, dtype=np.float32)
LOCK = threading.Lock()


def predict(params, x):
    return {"y": warm_layers.dense(params, x) * SCALE + TABLE + float(os.environ.get("OFFSET", "0"))}


def power(x, *, n):
    return x**n


def step(params, x):
    slopes = jax.grad(lambda p: jnp.mean(warm_layers.dense(p, x) ** 2))(params)
    return jax.tree.map(lambda p, s: p - 0.1 * s, params, slopes)


def scaling(weights):
    def scale(x):
        return x * weights["factor"]

    return scale


scaled = scaling({"factor": np.full(3, 2, np.float32)})


def drawn(key, x):
    key, now = jax.random.split(key)
    return key, x + jax.random.uniform(now, x.shape)


def counted(x):
    return x, 1.0


def locked(x):
    with LOCK:
        return x + 1
"""
PROGRAM = """\
import sys
import jax, numpy as np
import stagec.jax
traced = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **more: traced.append(more.get("fun_name")) if event.endswith("jaxpr_trace_duration") else None
)
with stagec.jax.warm("out/m.aot", verify=sys.argv[1]):
    from warm_program import run
run()
print("predict" in traced)
"""
UNCHANGED = """\
import jax, numpy as np
import warm_model


predict = jax.jit(warm_model.predict)


def run():
    for size in (2, 8):
        print(predict({"w": np.ones((6, 3), "f4"), "b": np.zeros(3, "f4")}, np.ones((size, 6), "f4"))["y"].sum())
    print(jax.jit(lambda x: x + 1)(1.0))
"""
PARAMS = {"w": np.linspace(-1, 1, 18, dtype=np.float32).reshape(6, 3), "b": np.ones(3, np.float32)}
X = np.linspace(0, 1, 12, dtype=np.float32).reshape(2, 6)
FIXED = np.full(3, 3, np.float32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    (folder / "out").mkdir()
    (folder / "m.toml").write_text(MANIFEST)
    (folder / "warm_layers.py").write_text(LAYERS)
    (folder / "warm_model.py").write_text(MODEL)
    build("m.toml", folder / "out", folder)
    return folder


@pytest.fixture
def bundle(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stagec.Bundle]:
    monkeypatch.syspath_prepend(root)
    monkeypatch.setattr(jax_warm, "_LATER", 0.01)
    for name in ("warm_layers", "warm_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with stagec.load(root / "out" / "m.aot", policy="executable_only") as loaded:
        yield loaded
    for name in ("warm_layers", "warm_model"):
        (root / f"{name}.py").write_text({"warm_layers": LAYERS, "warm_model": MODEL}[name])


@pytest.fixture
def traced(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The functions that JAX traces."""
    names: list[str] = []
    caplog.set_level(logging.WARNING, "jax.stagec")

    def listen(event: str, _: float, **more: Any) -> None:
        if event.endswith("jaxpr_trace_duration"):
            names.append(more["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def model() -> Any:
    return importlib.import_module("warm_model")


def joined() -> None:
    """Wait for the comparisons."""
    for thread in threading.enumerate():
        if thread.name in ("predict", "power", "step", "scaled"):
            thread.join()


def right(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what JAX gives."""
    return jax.tree.map(np.asarray, jax.jit(lambda *args: function(*args, **kwargs))(*args))


def test_what_was_built_runs_untraced(
    bundle: stagec.Bundle, traced: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """And gives what JAX gives: arrays of JAX, in the same structure, and donated ones are deleted."""
    predict = stagec.jax.jit(model().predict, bundle, verify="never")
    power = stagec.jax.jit(model().power, bundle, verify="never", static_argnames="n")
    step = stagec.jax.jit(model().step, bundle, verify="never", donate_argnums=0)
    held, x = jax.tree.map(jnp.asarray, PARAMS), np.ones((8, 6), np.float32)
    given = predict(PARAMS, X), power(FIXED, n=3), power(FIXED, n=2), step(held, x)
    assert not {*traced} & {"predict", "power", "step"}
    assert held["w"].is_deleted()
    assert not caplog.messages
    wanted = (
        right(model().predict, PARAMS, X),
        *(right(model().power, FIXED, n=n) for n in (3, 2)),
        right(model().step, PARAMS, x),
    )
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(given))
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, 1e-6), given, wanted)


@pytest.mark.parametrize("verify", ["first", "background"])
def test_the_same_program_is_compared_once(
    bundle: stagec.Bundle, traced: list[str], caplog: pytest.LogCaptureFixture, verify: Any
) -> None:
    """For all sizes, and then neither compiled nor traced again."""
    predict = stagec.jax.jit(model().predict, bundle, verify=verify)
    for x in (X, X, np.ones((8, 6), np.float32)):
        predict(PARAMS, x)
        joined()
    assert traced.count("predict") == 1
    assert not caplog.messages


def _edit(name: str, old: str, new: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def change(root: Path, _: pytest.MonkeyPatch) -> None:
        path = root / f"{name}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        importlib.invalidate_caches()

    return change


def _set(owner: Callable[[], Any], name: str, value: Any) -> Callable[[Path, pytest.MonkeyPatch], None]:
    return lambda _, patch: patch.setattr(owner(), name, value)


CHANGES: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "a global": (_set(model, "SCALE", 3.0), "a value that it reaches by a name or closed over is not the one"),
    "an array": (_set(model, "TABLE", np.ones(3, np.float32)), "a value that it reaches by a name or closed over"),
    "a type": (_set(model, "SCALE", np.float64(2)), "a value that it reaches by a name or closed over"),
    "a function of a module": (
        _set(lambda: importlib.import_module("warm_layers"), "dense", lambda params, x: x @ params["w"]),
        "a value that it reaches by a name or closed over",
    ),
    "a value of a class": (
        _set(lambda: importlib.import_module("warm_layers").Options, "bias", 3.0),
        "a value that it reaches by a name or closed over",
    ),
    "a source": (_edit("warm_layers", "jax.nn.relu(", "jax.nn.silu("), "the source of warm_layers is not the one"),
    "a package": (_set(lambda: np, "__version__", "1.0"), "numpy is 1.0, and it was built with "),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_what_differs_is_traced_and_told(
    root: Path,
    bundle: stagec.Bundle,
    traced: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    changed: str,
) -> None:
    """Without a comparison of the programs, too; and it is said once."""
    change, says = CHANGES[changed]
    if changed != "a source":
        model()
    change(root, monkeypatch)
    predict = stagec.jax.jit(model().predict, bundle, verify="never")
    for x in (X, X, np.ones((8, 6), np.float32)):
        np.testing.assert_array_equal(predict(PARAMS, x)["y"], right(model().predict, PARAMS, x)["y"])
    assert traced.count("predict") == 2
    (message,) = caplog.messages
    assert message.startswith(f"predict is traced: {says}")


HIDDEN: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "the environment": lambda _, patch: patch.setenv("OFFSET", "5"),
    "a function of a package": _set(lambda: jax.nn, "relu", jax.nn.silu),
}


@pytest.mark.parametrize("changed", HIDDEN)
@pytest.mark.parametrize("verify", ["first", "background"])
def test_what_nobody_recorded_is_found(
    root: Path,
    bundle: stagec.Bundle,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    changed: str,
    verify: Any,
) -> None:
    """First, no result is wrong. In the background stagec finds it, and later ones are right."""
    model()
    HIDDEN[changed](root, monkeypatch)
    caplog.set_level(logging.WARNING, "jax.stagec")
    predict = stagec.jax.jit(model().predict, bundle, verify=verify)
    wanted = right(model().predict, PARAMS, X)["y"]
    first = predict(PARAMS, X)["y"]
    joined()
    assert np.allclose(first, wanted) is (verify == "first")
    np.testing.assert_array_equal(predict(PARAMS, X)["y"], wanted)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    says = (
        "predict is not the program that was built, and is traced from now on: its operations or constants are others"
    )
    assert errors == [says]


def test_closures_and_settings(bundle: stagec.Bundle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "jax.stagec")
    names = stagec.jax.jit(model().scaled, bundle, verify="never"), FIXED
    assert names[0](FIXED).tolist() == [6, 6, 6]
    assert not caplog.messages
    other = model().scaling({"factor": np.full(3, 5, np.float32)})
    assert stagec.jax.jit(other, bundle, verify="never")(FIXED).tolist() == [15, 15, 15]
    assert caplog.messages.pop().startswith("scaled is traced: a value that it reaches by a name or closed over")
    caplog.clear()
    with jax.numpy_dtype_promotion("strict"):  # after a first call, too
        assert names[0](FIXED).tolist() == [6, 6, 6]
    says = "scaled is traced: jax_numpy_dtype_promotion is strict, and it was built with standard"
    assert caplog.messages == [says]
    assert names[0](FIXED).tolist() == [6, 6, 6]
    device = jax.devices()[-1]
    with jax.default_device(device):
        assert names[0](FIXED).devices() == {device}
    assert caplog.messages == [says, f"scaled is traced: jax_default_device is {device}, and it was built with off"]


def test_keys(bundle: stagec.Bundle, traced: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """A key and its words are arguments of two programs, and so are keys of two kinds."""
    drawn = stagec.jax.jit(model().drawn, bundle, verify="never")
    keys = jax.random.key(0), jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0)
    drawn(keys[0], FIXED)
    assert "drawn" not in traced
    for key, says in zip(keys, ((), ("key<rbg>[]",), ("key<rbg>[]", "u32[2]")), strict=True):
        jax.tree.map(_assert_same, drawn(key, FIXED), jax.jit(model().drawn)(key, FIXED))
        on = "is traced: no executable is for"
        assert caplog.messages == [f"drawn {on} {which}, f32[3] on this machine" for which in says]


def _assert_same(ours: jax.Array, theirs: jax.Array) -> None:
    assert jax.typeof(ours) == jax.typeof(theirs)
    values = (
        jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (ours, theirs)
    )
    np.testing.assert_allclose(*values, 1e-6)


CALLS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "another size": (lambda f: f(PARAMS, X[:1]), {}, "no executable is for f32[3], f32[6,3], f32[1,6] on this machine"),
    "another dtype": (lambda f: f(PARAMS, X.astype("f2")), {}, "no executable is for f32[3], f32[6,3], f16[2,6]"),
    "another structure": (lambda f: f(PARAMS, x=X), {}, "the arguments have another structure than those"),
    "donation": (lambda f: f(PARAMS, X), {"donate_argnums": 1}, "it was built with other donated arguments"),
    "an option": (lambda f: f(PARAMS, X), {"compiler_options": {}, "device": jax.devices()[0]}, "jax.jit has device"),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers", "ignore:.*device")
@pytest.mark.parametrize("call", CALLS)
def test_other_calls_are_those_of_jax(bundle: stagec.Bundle, caplog: pytest.LogCaptureFixture, call: str) -> None:
    caplog.set_level(logging.WARNING, "jax.stagec")
    run, options, says = CALLS[call]
    got = run(stagec.jax.jit(model().predict, bundle, verify="never", **options))
    assert np.array_equal(got["y"], run(jax.jit(model().predict))["y"])
    (message,) = caplog.messages
    assert message.startswith(f"predict is traced: {says}")


def test_static_values_by_type_and_value(bundle: stagec.Bundle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "jax.stagec")
    power = stagec.jax.jit(model().power, bundle, verify="never", static_argnames="n")
    assert power(FIXED, n=2).tolist() == [9, 9, 9]
    assert not caplog.messages
    assert power(FIXED, n=2.0).tolist() == [9, 9, 9]
    assert "power was not built with n=2.0, but with n=3; n=2" in caplog.messages[0]
    assert power(FIXED, n=4).tolist() == [81, 81, 81]


def test_inside_jax_it_is_the_function(bundle: stagec.Bundle) -> None:
    predict = stagec.jax.jit(model().predict, bundle)
    slopes = jax.grad(lambda params: predict(params, X)["y"].sum())(PARAMS)
    assert slopes["w"].shape == (6, 3)
    assert predict.lower(PARAMS, X).as_text().startswith("module @jit_predict")
    with jax.disable_jit():
        assert predict(PARAMS, X)["y"].shape == (2, 3)


def test_what_cannot_be_compared_is_traced(bundle: stagec.Bundle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "jax.stagec")
    assert stagec.jax.jit(model().locked, bundle)(FIXED).tolist() == [4, 4, 4]
    says = ["locked is traced: it reaches LOCK, a lock, which stagec cannot compare"]
    assert caplog.messages == says
    assert stagec.jax.jit(model().counted, bundle)(FIXED)[1].weak_type
    assert caplog.messages == [*says, "counted is traced: its result has a weak type, which no result of a bundle has"]
    with pytest.raises(KeyError, match="no function of m was built from warm_layers:dense"):
        stagec.jax.jit(model().warm_layers.dense, bundle)
    with pytest.raises(ValueError, match="verify is 'later'; write 'background', 'first' or 'never'"):
        stagec.jax.jit(model().scaled, bundle, verify="later")  # type: ignore[arg-type]


def test_a_program_that_nobody_changed(root: Path) -> None:
    (root / "warm_program.py").write_text(UNCHANGED)
    untraced, traced = ("78.0\n312.0\n2.0\n" + said for said in ("False\n", "True\n"))
    assert python(PROGRAM, root, "never") == (untraced, "")
    assert python(PROGRAM, root, "first") == (traced, "")
    assert python(PROGRAM, root, "background") == (untraced, "")
    printed, told = python(PROGRAM, root, "background", OFFSET="1")  # told, although the program has ended
    assert printed == untraced
    assert told.startswith("predict is not the program that was built")


def test_a_digest_has_no_address() -> None:
    """Keys and members of sets may be functions, whose `repr` differs in each process. Order counts in dicts alone."""

    def values(*reached: Any) -> str:
        described = premises._values(lambda: reached, [])
        assert not described["unknown"], described
        return described["values"]

    def first() -> None:
        pass

    def second() -> None:
        pass

    assert values({first, second, "a"}) == values({"a", second, first})
    assert values({first: 1, second: 2}) != values({second: 2, first: 1})
    program = "import re; from stagec.frontends.jax import premises as p\nprint(p._values(lambda: X, [])['values'])"
    reached = "X = ({len: 1, print: {abs, int, 'a'}}, re.compile('a' * 300))"
    text = program.replace("lambda: X", "(lambda X: lambda: X)(X)").replace("\n", f"\n{reached}\n")
    assert len({python(text, ROOT)[0] for _ in range(2)}) == 1
    objects = np.array([first])
    assert premises._values(lambda: objects, [])["unknown"] == "objects, a ndarray, which stagec cannot compare"


REACHED = """\
import abc, collections, dataclasses, enum, functools
import reached.inner.deep
class Base:
    bias = 1.0
    def g(self, x): return x
class Options(Base, abc.ABC):
    __slots__ = ("x",)
    sizes = (1, 2)
    names = {"a": [1]}
    @functools.cached_property
    def cached(self): return 1
class Pair(collections.namedtuple("Pair", "a b")):
    pass
class Kind(enum.Enum):
    A = 1
def reaches(x): return Options.names, Options, Pair, Kind, reached.inner.deep.SCALE
"""


def test_what_a_class_or_a_module_below_another_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reached" / "inner").mkdir(parents=True)
    (tmp_path / "reached" / "top.py").write_text(REACHED)
    (tmp_path / "reached" / "inner" / "deep.py").write_text("SCALE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    top, deep = (importlib.import_module(f"reached.{name}") for name in ("top", "inner.deep"))

    def values() -> str:
        described = premises._values(top.reaches, ["reached.top", "reached.inner.deep"])
        assert not described["unknown"], described
        return described["values"]

    before = values()
    for owner, name, value in (
        (top.Options, "sizes", (1, 3)),
        (top.Options, "names", {"a": [2]}),
        (top.Base, "bias", 2.0),
        (top.Base, "g", lambda self, x: x + 1),
        (deep, "SCALE", 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert values() != before, name
        assert values() == before


def test_the_page(tmp_path: Path) -> None:
    """The program of docs/with-jax.md, with the model of docs/bazel.md, and what is said of an edit."""
    section = (ROOT / "docs" / "with-jax.md").read_text("utf-8").partition("\n## Start without tracing\n")[2]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    pages = [(ROOT / "docs" / name).read_text("utf-8") for name in ("bazel.md", "with-jax.md")]
    (model,) = re.findall(r"```python\n(# models/scale.py\n.*?)```", pages[0], re.DOTALL)
    (manifest,) = re.findall(r"```toml\n(# models/models.toml\n.*?)```", pages[1], re.DOTALL)
    out = tmp_path / "bazel-bin" / "models"
    out.mkdir(parents=True)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "scale.py").write_text(model)
    (tmp_path / "models.toml").write_text(manifest)
    build("models.toml", out, tmp_path)
    assert python(program, tmp_path) == ("(32, 3)\n", "")
    (tmp_path / "models" / "scale.py").write_text(f"# a comment\n\n{model}")
    assert python(program, tmp_path) == ("(32, 3)\n", "")
    (tmp_path / "models" / "scale.py").write_text(model.replace("tanh", "sinh"))
    (says,) = re.findall(r"^    (scale is traced: .*\n)", section, re.MULTILINE)
    assert python(program, tmp_path) == ("(32, 3)\n", says)


def python(program: str, root: Path, *words: str, **variables: str) -> tuple[str, str]:
    """Run a program with stagec; return what it prints and logs."""
    site = [entry for entry in sys.path if entry.endswith("site-packages")]
    path = os.pathsep.join([*site, str(root), str(COMPILER)])
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **variables}
    command = [sys.executable, "-B", "-s", "-S", "-c", program, *words]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_lines_that_say_nothing_change_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of comments, and empty ones; but a string may have such lines."""
    monkeypatch.syspath_prepend(tmp_path)

    def digest(text: str) -> str:
        path = tmp_path / "said.py"
        path.write_text(text)
        return premises._source("said")

    plain = 'x = 1\n\n\ndef f():\n    return """a\n\n# b\n"""\n'
    assert (
        digest(plain) == digest("# about\n" + plain.replace("def", "  # more 'quoted\ndef")) == digest(plain + "\n#end")
    )
    assert digest(plain) != digest(plain.replace("# b", "# c"))
    assert digest(plain) != digest(plain.replace("\n\n# b", "\n# b"))
    assert digest(plain) != digest(plain.replace("    return", "  return"))


@pytest.mark.skipif(not hasattr(config, "trace_context_names"), reason="this JAX does not list them")
def test_settings_are_those_that_jax_traces_by() -> None:
    """JAX says which; names do not: one that changes programs has "log" in it (jax_use_hlo_logistic_lowering)."""
    names = [name for name in config.trace_context_names() if isinstance(jax.config.values.get(name), bool)]
    assert "jax_enable_x64" in names
    for name in [*names, "jax_log_compiles"]:
        before, value = premises.settings(), getattr(jax.config, name)
        jax.config.update(name, not value)
        try:
            assert (premises.settings() != before) == (name != "jax_log_compiles"), name
        finally:
            jax.config.update(name, value)
