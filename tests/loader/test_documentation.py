"""`help(stagec)` tells what there is, and which page of JAX's it follows.

Modules: `core/messages/refusal.py`, `loader/*.py`.
"""

import dataclasses
import doctest
import functools
import inspect
import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stagec
import stagec_arrays
from stagec.frontends.common.options import Options
from tests.building import COMPILER
from tests.caches import free_port
from tests.page_blocks import files

PAGES = {
    "Compiled": "jax.stages.html#jax.stages.Compiled",
    "Exported": "_autosummary/jax.export.Exported.html",
    "Lowered": "jax.stages.html#jax.stages.Lowered",
    "Mesh": "jax.sharding.html",
    "NamedSharding": "jax.sharding.html#jax.sharding.NamedSharding",
    "PartitionSpec": "jax.sharding.html#jax.sharding.PartitionSpec",
    "PyTreeNode": "custom_pytrees.html",
    "Traced": "jax.stages.html#jax.stages.Traced",
    "Wrapped": "jax.stages.html#jax.stages.Wrapped",
    "device_put": "_autosummary/jax.device_put.html",
    "distributed": "_autosummary/jax.distributed.initialize.html",
    "jit": "_autosummary/jax.jit.html",
    "make_array_from_process_local_data": "_autosummary/jax.make_array_from_process_local_data.html",
}
NAMESPACES = "lax", "nn", "numpy", "random"
CORE = {name: getattr(stagec, name) for name in stagec.__all__ if name != "__version__"}
PUBLIC = CORE | {name: getattr(stagec_arrays, name) for name in stagec_arrays.__all__ if name not in NAMESPACES}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
WITH_EXAMPLES = sorted(
    {
        *(name for name in PUBLIC if name not in CLASSES),
        *("ShapeDtypeStruct", "checkpoint_policies", "custom_vjp", "Function.flat", "Wrapped.trace", "Lowered.compile"),
        *("Compiled.serialize", "Exported.serialize", "Exported.call"),
    }
)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that a class of stagec has by itself or from another class of stagec."""
    for base in kind.__mro__:
        if base.__module__.startswith("stagec"):
            for name, value in vars(base).items():
                found = value.__func__ if isinstance(value, staticmethod) else value
                is_member = isinstance(found, property) or inspect.isfunction(found)
                if is_member and (not name.startswith("_") or name == "__call__"):
                    yield name, found


def starts_with_a_sentence(value: Any) -> bool:
    return bool(re.match(r"[A-Z`].*[.:]$", value.__doc__ or "", re.MULTILINE))


def unexplained(value: Any, names: Iterable[str]) -> list[str]:
    """The names that no line `name: ...` of the docstring is about."""
    return [name for name in names if not re.search(rf"^ *([\w, ]+, )?{name}\b[\w, ]*:", value.__doc__, re.MULTILINE)]


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_says_what_it_does(name: str) -> None:
    assert starts_with_a_sentence(PUBLIC[name])


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_example_runs(name: str, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every public function has one, and the methods that people call first; "model.aot" is a bundle."""
    (tmp_path / "model.aot").symlink_to(zoo)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for path, text in files("docs/without-bazel.md").items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    documentation = inspect.getdoc(functools.reduce(getattr, name.split(".")[1:], PUBLIC[name.partition(".")[0]])) or ""
    if name == "distributed":  # before this process uses a device
        path = os.pathsep.join([str(COMPILER), *sys.path])
        script = documentation.replace("29500", str(free_port()))
        done = subprocess.run(
            [sys.executable, "-c", _EXAMPLE], input=script, capture_output=True, text=True, env={"PYTHONPATH": path}
        )
        assert (done.returncode, done.stdout) == (0, "2 examples"), done.stdout + done.stderr
        return
    example = doctest.DocTestParser().get_doctest(
        documentation, {"stagec": stagec, "stagec_arrays": stagec_arrays}, name, None, 0
    )
    assert example.examples
    printed: list[str] = []
    doctest.DocTestRunner().run(example, out=printed.append)
    assert printed == []


_EXAMPLE = """
import doctest, sys, stagec
example = doctest.DocTestParser().get_doctest(sys.stdin.read(), {"stagec": stagec}, "", None, 0)
failed, tried = doctest.DocTestRunner().run(example)
print(tried, "examples", end="")
sys.exit(failed)
"""


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_and_field_says_what_it_is(name: str) -> None:
    kind = CLASSES[name]
    assert [member for member, value in members(kind) if not starts_with_a_sentence(value)] == []
    if dataclasses.is_dataclass(kind):
        fields = [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]
        assert unexplained(kind, fields) == []
    assert unexplained(kind, getattr(kind, "_fields", ())) == []


@pytest.mark.parametrize("name", ["Bundle", "Function", "jit", "load"])
def test_every_parameter_and_attribute_is_explained(name: str) -> None:
    names = {
        "Bundle": ["name", "version", "target"],
        "Function": ["name", "static", "variants"],
        "jit": ["frontend", *Options.__annotations__],
        "load": list(inspect.signature(stagec.load).parameters)[1:],
    }[name]
    assert unexplained(PUBLIC[name], names) == []


@pytest.mark.parametrize("name", PAGES)
def test_what_follows_jax_names_its_page(name: str) -> None:
    assert f"https://docs.jax.dev/en/latest/{PAGES[name]}" in PUBLIC[name].__doc__


def test_every_refusal_lists_its_codes() -> None:
    for name in ("LoadError", "CallError"):
        assert re.search(r'Codes: ("[a-z-]+",\s+)*"[a-z-]+"\.', PUBLIC[name].__doc__)


def test_help_shows_it_all() -> None:
    text = pydoc.plain(pydoc.render_doc(stagec))
    for name in CORE:
        assert re.search(rf"^    (class )?{name}\(", text, re.MULTILINE), name


def test_help_works_without_jax() -> None:
    path = [str(COMPILER), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    script = f"import sys; sys.path[:0] = {path!r}; sys.modules['jax'] = None; import stagec; help(stagec)"
    done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "class Compiled" in done.stdout
    assert "class Wrapped" in done.stdout
    assert "class Traced" in done.stdout


def test_help_of_a_function_shows_the_call(zoo: Path) -> None:
    with stagec.load(zoo) as bundle:
        text = pydoc.plain(pydoc.render_doc(bundle["mlp"]))
        assert [line.rstrip() for line in text.splitlines()[2:]] == [
            "Function(mlp: batch1, batch4)",
            "    mlp(params, x, /) -> f32[batch,4]",
            "      params.b  f32[4]",
            "      params.w  f32[16,4]",
            "      x         f32[batch,16]",
            "",
            "    Buckets: batch = 1; batch = 4",
        ]
        named = bundle["named"].__doc__ or ""
        assert [line for line in named.splitlines() if not line.startswith(" ")] == [
            "named(x, unused, /, *, shift, power=3) -> f32[3]",
            "",
            "named(x, unused, /, *, shift, power=2) -> f32[3]",
        ]
        assert "valid        bool[n]  made by the loader where you leave it out" in (bundle["pooled"].__doc__ or "")
        assert "Smaller sizes of n are padded." in (bundle["pooled"].__doc__ or "")
        closed = bundle["mlp"]
    assert closed.__doc__ == stagec.Function.__doc__
    assert (stagec.Function.__doc__ or "").startswith("A function of a bundle.")


def test_what_a_session_shows(zoo: Path) -> None:
    """Names that are wrong, completion of names, signatures; and a path of any kind."""
    path = type("Place", (os.PathLike,), {"__fspath__": lambda self: str(zoo)})()
    with stagec.load(path) as bundle:
        with pytest.raises(KeyError, match=r"the bundle zoo has no function \"mpl\": did you mean \"mlp\"\?'$"):
            bundle["mpl"]
        with pytest.raises(AttributeError, match=r"has no attribute 'mlp': write bundle\[\"mlp\"\]$"):
            bundle.mlp  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(AttributeError, match=r"has no attribute 'mpl'$"):
            bundle.mpl  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(KeyError, match=r"no function \"\": write one of .*mlp"):
            bundle.select("")
        assert ("mlp" in bundle, "mpl" in bundle, bundle.get("mpl")) == (True, False, None)
        assert bundle._ipython_key_completions_() == list(bundle)
        assert str(inspect.signature(bundle["mlp"])) == "(params, x, /)"
        variant = next(iter(bundle["named"].variants.values()))
        assert str(inspect.signature(variant)) == "(x, unused, /, *, shift, power=3)"
        assert re.fullmatch(r"Selection\(mlp: \S+, of \d+ candidates\)", repr(bundle.select("mlp")))


def test_signatures_of_jitted_functions() -> None:
    def predict(params: Any, x: Any, *, scale: float = 1.0) -> Any:
        """Return it."""
        return x

    for frontend in ("jax", "arrays"):
        wrapped = stagec.jit(predict, frontend=frontend)
        assert inspect.signature(wrapped) == inspect.signature(predict)
        assert (wrapped.__name__, wrapped.__doc__) == ("predict", "Return it.")


TYPED = """
import stagec

@stagec.jit
def half(x: int, by: float = 2) -> float:
    return x / by

@stagec.jit(static_argnames="by", frontend="arrays")
def twice(x: int, *, by: int) -> str:
    return str(x * by)

class Model:
    @stagec.jit
    def step(self, x: int) -> float:
        return x / 2

reveal_type(half(1))
reveal_type(twice(1, by=2))
reveal_type(Model().step(1))
reveal_type(half.lower(1))
half("1")
"""


def test_jit_keeps_types(tmp_path: Path) -> None:
    """mypy sees what the function takes and gives."""
    pytest.importorskip("mypy", reason="the newest packages have none")
    (tmp_path / "typed.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir", str(tmp_path), "--ignore-missing-imports"]
    environment = {**os.environ, "MYPYPATH": str(COMPILER)}
    done = subprocess.run(
        [*command, "--follow-imports=silent", "typed.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    said = [line.partition(": ")[2] for line in done.stdout.splitlines()[:-1] if line.startswith("typed.py")]
    assert said == [
        'note: Revealed type is "float"',
        'note: Revealed type is "str"',
        'note: Revealed type is "float"',
        'note: Revealed type is "stagec.stages.lowered.Lowered"',
        'error: Argument 1 to "__call__" of "Wrapped" has incompatible type "str"; expected "int"  [arg-type]',
    ], done.stdout
