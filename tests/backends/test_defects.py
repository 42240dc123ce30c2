"""Programs that a release of XLA cannot run are compiled around its defects: they run, and have the right numbers.

Modules: `backends/cpu/defects.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
from stagec.backends.compilation import CannotCompile
from stagec.backends.cpu import defects
from stagec.bundle.archive import Archive
from stagec.bundle.description import LARGEST, Description
from stagec.core.builds import releases
from stagec.pjrt import compatibility
from tests.building import COMPILER, ROOT, build, stagec as command

RELEASE = compatibility.version()
KNOWN = releases.release(RELEASE).defects
WITHOUT = f'{defects.OPTION} = ""'

# Programs with each defect: a function of NumPy and of JAX alike, and the shapes of its arguments.
PROGRAMS = {
    "jax#40412": [
        ("(x * y).sum(axis=3)", [(3, 1, 2, 2, 8, 8, 8), (3, 1, 2, 2, 8, 8, 8)]),
        ("(x * y).mean(axis=3)", [(1, 3, 2, 2, 8, 8, 8), (1, 3, 2, 2, 8, 8, 8)]),
        ("(x * y).sum(axis=3)", [(3, 1, 2, 2, 8, 8, 8), (1, 1, 2, 2, 8, 8, 8)]),
        ("(x * y).mean(axis=2)", [(2, 3, 2, 16, 9, 1, 9), (2, 3, 1, 16, 9, 1, 1)]),
        # jax#39257
        ("(x[..., None, None, None, None, None] * y).sum(axis=2).clip(1e-9)", [(10, 4, 6), (10, 4, 6, 9, 9, 9, 9, 9)]),
    ],
    "jax#39103": [
        ("(x @ y.T).sum(axis=0)", [(3, 3), (40_001, 3)]),
        ("(x @ y.T).max(axis=0)", [(2, 3), (32_769, 3)]),
        ("((x @ y.swapaxes(1, 2)) ** 2 + 1).sum(axis=1)", [(2, 3, 3), (2, 40_001, 3)]),
    ],
}
RIGHT = """
import sys
import jax, numpy as np, stagec
by, programs = sys.argv[1], eval(sys.argv[2])
for text, shapes in programs:
    function = eval("lambda x, y: " + text)
    given = [np.random.default_rng(i).integers(-3, 4, shape).astype(np.float32) for i, shape in enumerate(shapes)]
    wanted = function(*[x.astype(np.float64) for x in given])
    if by == "jax":
        result = jax.jit(function)(*given)
    else:
        compiled = stagec.jit(function).lower(*given).compile()
        print(*compiled.description.avoided)
        result = compiled(*given)
    np.testing.assert_allclose(np.asarray(result), wanted, rtol=1e-4, atol=1e-4, err_msg=text)
"""


def run(by: str, *programs: tuple[str, object]) -> subprocess.CompletedProcess[str]:
    """Compare results of programs with NumPy's in another process, which may die."""
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    env = {"PYTHONPATH": os.pathsep.join([*packages, str(COMPILER), str(ROOT)]), "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-B", "-s", "-c", RIGHT, by, repr(programs)]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)


def test_each_defect_has_programs() -> None:
    assert [defect.issue for defect in defects.DEFECTS] == list(PROGRAMS)
    assert {issue for release in releases.known().values() for issue in release.defects} == {*PROGRAMS}


@pytest.mark.parametrize("issue", PROGRAMS)
def test_programs_with_a_defect(issue: str) -> None:
    """A row is there for the releases that need it: those that get it right by themselves are compiled as JAX does."""
    done = run("stagec", *PROGRAMS[issue])
    assert done.returncode == 0, done.stderr
    avoided = done.stdout.splitlines()
    assert {*avoided} <= {issue, ""}
    assert issue in KNOWN or not any(avoided)
    others = [program for program, row in zip(PROGRAMS[issue], avoided, strict=True) if not row]
    assert not others or run("jax", *others).returncode == 0


@pytest.mark.parametrize("issue", PROGRAMS)
def test_a_row_is_needed(issue: str) -> None:
    """In each release of a row, JAX itself ends or gives wrong numbers for at least one program."""
    if issue not in KNOWN:
        pytest.skip(f"jaxlib {RELEASE} does not have it")
    assert any(run("jax", program).returncode for program in PROGRAMS[issue])


MANIFEST = """
[manifest]
name = "it"
version = "1"
[functions.seven]
entry = "model:seven"
args = ["f32[3,1,2,2,8,8,8]", "f32[3,1,2,2,8,8,8]"]
targets = ["cpu-avx2"]
golden = {}
[functions.portable]
platforms = ["cpu"]
entry = "model:seven"
args = ["f32[3,1,2,2,8,8,8]", "f32[3,1,2,2,8,8,8]"]
[functions.fine]
entry = "model:fine"
args = ["f32[64,64]", "f32[64,64]"]
targets = ["cpu-avx2"]
"""
MODEL = """
import jax.numpy as jnp

def seven(x, y):
    return jnp.sum(x * y, axis=3)

def fine(x, y):
    return jnp.sum((x @ y - 1) ** 2, axis=1)
"""
CALLS = """
import sys
import numpy as np, stagec
ones = np.ones((3, 1, 2, 2, 8, 8, 8), np.float32)
bundle = stagec.load(sys.argv[1])
for name in ("seven", "portable"):
    assert (np.asarray(bundle[name](ones, ones)) == 2).all()
"""


def test_a_bundle_is_compiled_around_it(tmp_path: Path) -> None:
    """Its executable, its golden results, and what the loader compiles of the portable form."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "it.toml").write_text(MANIFEST)
    out = tmp_path / "out"
    out.mkdir()
    bundle = build("it.toml", out, tmp_path)
    avoided = {issue: WITHOUT for issue in ("jax#40412",) if issue in KNOWN}
    archive = Archive(bundle)
    described = {
        name: Description.from_json(archive.read(f"{name}.cpu-avx2.json", LARGEST)) for name in ("seven", "fine")
    }
    assert {name: description.avoided for name, description in described.items()} == {"seven": avoided, "fine": {}}
    assert described["seven"].target.compiler_options == {}
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    env = {"PYTHONPATH": os.pathsep.join([*packages, str(COMPILER)])}
    done = subprocess.run([sys.executable, "-B", "-c", CALLS, bundle], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = ["action", "compile", "--spec", out / "it.seven.cpu-avx2.spec", "--exported", out / "it.seven.exported"]
    again = command(*words, "--output", tmp_path / "x.xla", "--description", tmp_path / "x.json", cwd=tmp_path)
    warning = f"warning: jaxlib {RELEASE} has a defect that this program meets (jax#40412): it is compiled"
    assert again.stderr == (f"it.toml: functions.seven: {warning} with {WITHOUT}\n" if avoided else "")
    assert (tmp_path / "x.xla").read_bytes() == (out / "it.seven.cpu-avx2.xla").read_bytes()
    told = [f"jax#40412 is avoided, with the compiler option {WITHOUT}"] * len(avoided)
    for file in (bundle, out / "it.seven.cpu-avx2.xla"):
        lines = command("inspect", file).stdout.splitlines()
        assert [line.split("defect ")[-1].strip() for line in lines if "avoided" in line] == told


def test_what_looks_alike_and_works_keeps_its_fusions() -> None:
    """Without YNNPACK other programs would lose the bits of `jax.jit`, and speed."""
    x, w = np.ones((40_001, 3), np.float32), np.ones((3, 3), np.float32)
    q = np.ones((2, 8, 128, 64), np.float32)

    def attention(q: jax.Array, k: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k), -1)

    for function, *arguments in [
        (attention, q, q),
        (lambda x, w: jnp.sum((x @ w - 1) ** 2, axis=1), x, w),
        (lambda x, w: jnp.mean((x @ w.T - 1) ** 2), x, w),
        (lambda x, w: jax.vmap(lambda row: jnp.sum((w @ row) ** 2))(x), x[:4000], w),
        (lambda x, w: x @ w, x, w),
    ]:
        compiled = stagec.jit(function).lower(*arguments).compile()
        assert compiled.description.avoided == {}
        assert "__ynn_fusion" in compiled.as_text()


@pytest.mark.skipif("jax#40412" not in KNOWN, reason=f"jaxlib {RELEASE} does not have it")
def test_an_option_of_the_user_is_not_changed() -> None:
    x = np.ones((3, 1, 2, 2, 8, 8, 8), np.float32)
    lowered = stagec.jit(lambda x, y: jnp.sum(x * y, axis=3)).lower(x, x)
    assert lowered.compile(compiler_options={defects.OPTION: ""}).description.avoided == {}
    with pytest.raises(CannotCompile) as refusal:
        lowered.compile(compiler_options={defects.OPTION: "LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_ELTWISE"})
    assert str(refusal.value) == (
        f"XLA of jaxlib {RELEASE} makes a program of it that must not run: it ends the process or gives wrong numbers "
        "where it leaves arrays of seven or more dimensions to YNNPACK (jax#40412)"
    )
    assert refusal.value.write == f"leave it out, or write {WITHOUT}"
