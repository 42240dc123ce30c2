"""Exporting user code: what goes wrong there, and what the message says. Each case runs the command, as Bazel does.

Modules: `cli/actions/export.py`, `cli/actions/jaxpr.py`, `frontends/common/entries.py`,
`frontends/common/user_code.py`.
"""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import pytest

from stagec import load
from stagec.core.builds.specs import to_json
from stagec.frontends.common import user_code
from stagec.stages.exported import Exported
from tests.building import action_environment, build, checked, stagec
from tests.frontends.workspace import export, spec

MODEL = '''\
"""A model."""
import collections

import jax
import jax.numpy as jnp

Point = collections.namedtuple("Point", "x y")


def double(x):
    return 2 * x


def raises(x):
    return helper(x)


def helper(x):
    raise RuntimeError("the model is broken")


def mismatch(x, y):
    return x @ y


def data_dependent(x):
    if x.sum() > 0:
        return x
    return -x


def reshaped(x):
    return x if x.shape[0] > 4 else -x


def exits(x):
    raise SystemExit(3)


def returns_point(x):
    return Point(x, x)


def scaled(x, *, by, steps):
    for _ in range(steps):
        x = x * by
    return x


def not_avals():
    return ["f32[2]"]


def bad_leaves():
    return ({"w": "f32[2]", "b": jax.ShapeDtypeStruct((2,), jnp.float32)},)


def raising_avals():
    raise ValueError("no configuration")


def kwarg_avals():
    return {"x": jnp.zeros((2, 3))}


EXAMPLE = jnp.zeros((2, 3)), [jnp.zeros(4), jnp.zeros(4)]


def gathered(x, *rest, scale):
    return x * scale, rest


def gathered_too(x, pair):
    return x, pair


def sharded_avals():
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    w, b = (jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding) for sharding in (split, None))
    return ({"w": w, "b": b},)


already = jax.jit(double)
constant = 3


def mixed_keys():
    return ({1: jax.ShapeDtypeStruct((2,), jnp.float32), (2, "b"): jax.ShapeDtypeStruct((2,), jnp.float32)},)


def avals_of(size, *others, scale=1):
    return (size,)
'''


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    (root / "pkg").mkdir()
    (root / "pkg" / "model.py").write_text(MODEL)
    (root / "pkg" / "broken.py").write_text("import no_such_package\n")
    (root / "pkg" / "syntax.py").write_text("def f(:\n")
    (root / "pkg" / "short.safetensors").write_bytes(b"\x05\0")
    return root


WRONG = {
    "no module": (
        {"entry": "pkg.modle:double"},
        "pkg/m.toml: functions.f.entry: no module 'pkg.modle'\n"
        "  write the module as it is imported from the workspace root, and name its file in deps\n",
    ),
    "no package": (
        {"entry": "kpg.model:double"},
        "pkg/m.toml: functions.f.entry: no module 'kpg'\n"
        "  write the module as it is imported from the workspace root, and name its file in deps\n",
    ),
    "avals with parameters": (
        {"args": [], "avals": "pkg.model:avals_of"},
        "pkg/m.toml: functions.f.avals: pkg.model:avals_of has parameters: size\n"
        "  it is called without arguments: give them defaults, or leave them out\n",
    ),
    "no attribute": (
        {"entry": "pkg.model:duoble"},
        "pkg/m.toml: functions.f.entry: pkg.model has no attribute 'duoble'\n  did you mean 'double'?\n",
    ),
    "not callable": (
        {"entry": "pkg.model:constant"},
        "pkg/m.toml: functions.f.entry: pkg.model:constant is not callable (a int)\n",
    ),
    "the module needs a package that is not there": (
        {"entry": "pkg.broken:f"},
        "pkg/m.toml: functions.f.entry: importing pkg.broken raised ModuleNotFoundError\n"
        '    File "pkg/broken.py", line 1, in <module>\n'
        "      import no_such_package\n"
        "  ModuleNotFoundError: No module named 'no_such_package'\n"
        "  if no_such_package is a package of others: find out which package brings it, and write that into "
        "requirements.in, and run bazel run @stagec//:lock -- requirements.in\n"
        "  if it is a file of the workspace: name it in deps of aot_manifest in BUILD, such as "
        '"//FOLDER:no_such_package.py"\n',
    ),
    "the module does not parse": (
        {"entry": "pkg.syntax:f"},
        "pkg/m.toml: functions.f.entry: importing pkg.syntax raised SyntaxError\n"
        '    File "pkg/syntax.py", line 1\n'
        "      def f(:\n"
        "  SyntaxError: invalid syntax\n",
    ),
    "the function raises": (
        {"entry": "pkg.model:raises"},
        "pkg/m.toml: functions.f: staging pkg.model:raises raised RuntimeError\n"
        '    File "pkg/model.py", line 15, in raises\n'
        "      return helper(x)\n"
        '    File "pkg/model.py", line 19, in helper\n'
        '      raise RuntimeError("the model is broken")\n'
        "  RuntimeError: the model is broken\n",
    ),
    "the function exits": (
        {"entry": "pkg.model:exits"},
        "pkg/m.toml: functions.f: staging pkg.model:exits raised SystemExit\n"
        '    File "pkg/model.py", line 37, in exits\n'
        "      raise SystemExit(3)\n"
        "  SystemExit: 3\n",
    ),
    "shapes that do not fit": (
        {"entry": "pkg.model:mismatch", "args": ["f32[2,3]", "f32[4,5]"]},
        "pkg/m.toml: functions.f: staging pkg.model:mismatch raised TypeError\n"
        '    File "pkg/model.py", line 23, in mismatch\n'
        "      return x @ y\n"
        "  TypeError: dot_general requires contracting dimensions to have the same shape, got (3,) and (4,).\n",
    ),
    "a parameter that does not exist": (
        {"donate_argnames": ["state"], "static": {"n": 1}},
        "pkg/m.toml: functions.f.static: pkg.model:double has no parameter 'n'\n"
        "  its parameters: x\n"
        "pkg/m.toml: functions.f.donate_argnames: pkg.model:double has no parameter 'state'\n"
        "  its parameters: x\n",
    ),
    "too many arguments": (
        {"args": ["f32[2]", "f32[2]"]},
        "pkg/m.toml: functions.f: the arguments do not fit pkg.model:double(x): too many positional arguments\n",
    ),
    "avals of another kind": (
        {"args": [], "avals": "pkg.model:not_avals"},
        "pkg/m.toml: functions.f.avals: pkg.model:not_avals returned a list\n"
        "  return the positional arguments as a tuple, or keyword arguments as a dict, of jax.ShapeDtypeStruct\n",
    ),
    "leaves that are not avals": (
        {"args": [], "avals": "pkg.model:bad_leaves"},
        "pkg/m.toml: functions.f.avals: pkg.model:bad_leaves returned leaves that are not avals: [0]['w'] is a str\n"
        "  return the positional arguments as a tuple, or keyword arguments as a dict, of jax.ShapeDtypeStruct\n",
    ),
    "avals in a dict whose keys cannot be sorted": (
        {"args": [], "avals": "pkg.model:mixed_keys"},
        "pkg/m.toml: functions.f.avals: a tree that pkg.model:mixed_keys returned raised ValueError\n"
        "  ValueError: Comparator raised exception while sorting pytree dictionary keys.\n",
    ),
    "avals that are split over devices": (
        {"args": [], "avals": "pkg.model:sharded_avals"},
        "pkg/m.toml: functions.f.avals: pkg.model:sharded_avals returned avals with shardings: [0]['w']\n"
        "  name a mesh in the manifest, and write in_shardings over it\n",
    ),
    "avals that raise": (
        {"args": [], "avals": "pkg.model:raising_avals"},
        "pkg/m.toml: functions.f.avals: pkg.model:raising_avals raised ValueError\n"
        '    File "pkg/model.py", line 59, in raising_avals\n'
        '      raise ValueError("no configuration")\n'
        "  ValueError: no configuration\n",
    ),
    "a weights file that is missing": (
        {"args": ["safetensors:none.safetensors"]},
        "pkg/m.toml: functions.f.args[0]: no file pkg/none.safetensors\n"
        "  name the file in data, relative to the manifest's folder\n",
    ),
    "a weights file that is damaged": (
        {"args": ["safetensors:short.safetensors"]},
        "pkg/m.toml: functions.f.args[0]: pkg/short.safetensors is not a safetensors file that stagec can read: "
        "the header runs over the end of the file\n",
    ),
}


def _without_marks(text: str) -> str:
    """Drop the lines that underline code in a traceback: Python versions place them differently."""
    return re.sub(r"^ +[~^]+\n", "", text, flags=re.MULTILINE)


LOCK = "and run bazel run @stagec//:lock -- requirements.in"


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        (
            "import skopt.plots",
            f'it is of the package scikit-optimize: write "scikit-optimize" into requirements.in, {LOCK}',
        ),
        ("import needy", f"write the package that brings it into requirements.in, {LOCK}"),
        (
            "import code.models.net",
            "Python's own module code hides the folder code: rename the folder; or write models, and in aot_manifest "
            'the way from BUILD to the folder, such as imports = ["../code"]',
        ),
        (
            "import jax.no_such_module",
            "the jax of the lock has no jax.no_such_module: write another version into requirements.in",
        ),
        (
            "import pkg.layers",
            'pkg/layers.py is a module of the workspace: write ["layers.py"] in deps of aot_manifest in BUILD',
        ),
        (
            "from pkg import layers",
            'pkg/layers.py is a module of the workspace: write ["layers.py"] in deps of aot_manifest in BUILD',
        ),
        (
            "from . import layers",
            'pkg/layers.py is a module of the workspace: write ["layers.py"] in deps of aot_manifest in BUILD',
        ),
        (
            "import common.deep.norm",
            "common/deep/norm.py is a module of the workspace: "
            'write ["//common/deep:norm.py"] in deps of aot_manifest in BUILD',
        ),
        (
            "import model",
            'pkg/model.py is there: import it as pkg.model, or write imports = ["."] in aot_manifest',
        ),
        (
            "open('pkg/vocabulary.txt')",
            'pkg/vocabulary.txt is data of the model: write ["vocabulary.txt"] in data of aot_manifest in BUILD, or '
            "give stagec build --data pkg/vocabulary.txt",
        ),
        (
            "import pathlib\npathlib.Path(__file__).with_name('vocabulary.txt').read_text()",
            'pkg/vocabulary.txt is data of the model: write ["vocabulary.txt"] in data of aot_manifest in BUILD, or '
            "give stagec build --data pkg/vocabulary.txt",
        ),
        (
            "import numpy\nnumpy.load('data/table.npy')",
            'data/table.npy is data of the model: write ["//data:table.npy"] in data of aot_manifest in BUILD, or '
            "give stagec build --data data/table.npy",
        ),
        (
            "try:\n    open('pkg/vocabulary.txt')\nexcept OSError as error:\n    raise ValueError('none') from error",
            'pkg/vocabulary.txt is data of the model: write ["vocabulary.txt"] in data of aot_manifest in BUILD, or '
            "give stagec build --data pkg/vocabulary.txt",
        ),
        (
            "open('short.safetensors')",
            'pkg/short.safetensors is there, and paths are relative to the workspace: open "pkg/short.safetensors"',
        ),
        (
            "open('/nowhere/words.txt')",
            "an action reads files of the workspace alone: copy it there, and name it in data of aot_manifest in BUILD"
            ", or with --data",
        ),
        ("import subprocess\nsubprocess.run(['no-such-program'])", ""),
        ("from math import no_such_name", ""),
    ],
)
def test_what_to_write_for_a_module_or_a_file_that_is_missing(
    workspace: Path, tmp_path: Path, source: str, advice: str
) -> None:
    (workspace / "pkg" / "lacks.py").write_text(f"{source}\n")
    (workspace / "common" / "deep").mkdir(parents=True, exist_ok=True)
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "needy.py").write_text("import lacking\n")
    (workspace / "f.spec").write_text(to_json(spec(entry="pkg.lacks:f")))
    words = (
        "action",
        "export",
        "--spec",
        "f.spec",
        "--output",
        "f.exported",
        "--import-root",
        ".",
        "--import-root",
        library,
    )
    done = stagec(*words, cwd=workspace)
    assert done.returncode == 2
    _, _, said = done.stderr.rpartition("Error: ")
    assert said.partition("\n")[2] == (f"  {advice}\n" if advice else "")


_TAKE = "take it from jax.sharding.get_abstract_mesh() in the function, or leave mesh out of jax.shard_map"
_WITHOUT = (
    "a build has one device, and the manifest says over which mesh a function runs: write for example\n"
    f'mesh = "grid" for functions.f, and a table [meshes.grid] with axes = {{ data = 2, model = 2 }};\n{_TAKE}'
)
_WITH = f"a build has one device, and the function runs over its mesh in [meshes] (data = 2, model = 2):\n{_TAKE}"
_AUTO = 'its mesh has Auto axes: for those of jax.make_mesh, write axis_types = ["Explicit", "Explicit"] in [meshes]'


@pytest.mark.parametrize(
    ("model", "without", "over"),
    [
        ("MESH = jax.make_mesh((2, 2), ('data', 'model'))\ndef f(x):\n    return x", _WITHOUT, _WITH),
        ("def f(x):\n    return x.at[:].set(len(jax.make_mesh((2, 2), ('data', 'model')).shape))", _WITHOUT, _WITH),
        ("def f(x):\n    return jax.shard_map(abs, in_specs=P('data'), out_specs=P('data'))(x)", _WITHOUT, None),
        ("def f(x):\n    return jax.lax.with_sharding_constraint(x, P('data'))", _WITHOUT, None),
        ("def f(x):\n    return jax.sharding.reshard(x, P('data'))", _WITHOUT, _AUTO),
        ("def f(x):\n    Mesh(mesh_utils.create_device_mesh((2, 2)), ('data', 'model'))", _WITHOUT, _WITH),
        ("def f(x):\n    Mesh(np.reshape(jax.devices(), (2, 2)), ('data', 'model'))", _WITHOUT, _WITH),
        ("def f(x):\n    return np.reshape(np.ones(1), (2, 2)) + x", "", ""),
        ("def f(x):\n    with jax.set_mesh(jax.make_mesh((1,), ('data',))):\n        return x", _WITHOUT, _WITH),
    ],
)
def test_what_to_write_for_a_mesh(tmp_path: Path, model: str, without: str, over: str | None) -> None:
    """With a mesh in the manifest, and without; None: it is exported."""
    imports = "import jax, numpy as np\nfrom jax.experimental import mesh_utils\nfrom jax.sharding import *\n"
    (tmp_path / "model.py").write_text(f"{imports}P = PartitionSpec\n{model}\n")
    for mesh, advice in ((), without), ((("data", 2), ("model", 2)), over):
        one = spec(entry="model:f", args=["f32[4]"], mesh=mesh)
        (tmp_path / "f.spec").write_text(to_json(one))
        done = stagec(
            "action", "export", "--spec", "f.spec", "--output", "f.exported", "--import-root", ".", cwd=tmp_path
        )
        assert (done.returncode == 0) is (advice is None), done.stderr
        _, _, said = done.stderr.rpartition("Error: ")
        lines = "".join(f"  {line}\n" for line in (advice or "").splitlines())
        assert said.partition("\n")[2] == lines


def test_explicit_axes(tmp_path: Path) -> None:
    """A model sees the split of its arguments in their types, also with a symbolic size; JAX computes its results."""
    manifest = """
        [manifest]
        name = "m"
        version = "1"
        [meshes.explicit]
        axes = { data = 2, model = 2 }
        axis_types = ["Explicit", "Explicit"]
        [meshes.mixed]
        axes = { data = 2, model = 2 }
        axis_types = ["Explicit", "Auto"]
        [functions.product]
        entry = "model:product"
        args = [{ w = "f32[8,6]" }, "f32[batch,8]"]
        mesh = "explicit"
        in_shardings = [{ w = "P(None, model)" }, "P(data)"]
        out_shardings = "P(data)"
        constraints = ["batch % 2 == 0"]
        buckets.batch = [2, 4]
        golden = { seed = 1 }
        targets = ["cpu-avx2"]
        [functions.half]
        entry = "model:half"
        args = ["f32[4,8]", "f32[8,6]"]
        mesh = "mixed"
        in_shardings = ["P(data)", "P(None, model)"]
        golden = { seed = 1 }
        targets = ["cpu-avx2"]
    """
    model = """
        import jax, jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        def product(params, x):
            assert jax.typeof(params["w"]).sharding.spec == P(None, "model")
            x = jnp.concatenate([x, jnp.full_like(x, x.shape[0])])
            y = x @ params["w"] / (x.shape[0] // 4 + 1)
            assert jax.typeof(y).sharding.spec == P("data", "model")
            return jax.sharding.reshard(y, P("data", None))
        def half(x, w):
            assert jax.typeof(x).sharding.spec == P("data", None)
            assert jax.typeof(w).sharding.spec == P(None, None)  # of Auto axes, types say nothing
            return (x @ w).sum(0)
    """
    (tmp_path / "m.toml").write_text(textwrap.dedent(manifest))
    (tmp_path / "model.py").write_text(textwrap.dedent(model))
    (tmp_path / "out").mkdir()
    bundle = load(build("m.toml", tmp_path / "out", tmp_path))
    draw = np.random.default_rng(1)
    w = draw.normal(size=(8, 6)).astype("f4")
    for size in (2, 4):
        x = draw.normal(size=(size, 8)).astype("f4")
        expected = np.concatenate([x, np.full_like(x, size)]) @ w / (2 * size // 4 + 1)
        np.testing.assert_allclose(np.asarray(bundle["product"]({"w": w}, x)), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(bundle["half"](x, w)), (x @ w).sum(0), rtol=1e-5, atol=1e-5)
    checked("run", tmp_path / "out" / "m.aot", "--golden")


@pytest.mark.parametrize(
    ("module", "file", "label"),
    [
        ("helper", "pkg/helper.py", "helper.py"),
        ("helpers.first", "pkg/helpers/NAME.py", "helpers/NAME.py"),
        ("shared.norm", "shared/NAME.py", "//shared:NAME.py"),
    ],
)
def test_a_module_that_the_sandbox_shows_behind_a_link(
    workspace: Path, tmp_path: Path, module: str, file: str, label: str
) -> None:
    """Bazel's sandboxes have links to the files of the workspace."""
    (workspace / "pkg" / "scripted.py").write_text(f"import {module}\n")
    (workspace / file).parent.mkdir(exist_ok=True)
    (workspace / file).write_text("")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "scripted.py").symlink_to(workspace / "pkg" / "scripted.py")
    (tmp_path / "f.spec").write_text(to_json(spec(entry="pkg.scripted:f")))
    done = stagec("action", "export", "--spec", "f.spec", "--output", "f.exported", "--import-root", ".", cwd=tmp_path)
    assert done.stderr.endswith(
        f'\n  {file} is a module of the workspace: write ["{label}"] in deps of aot_manifest in BUILD\n'
    )


def test_paths_in_a_text() -> None:
    text = f"in {Path.cwd()}/pkg/a.py:1, (/x/y-1/lib/site-packages/jax/b.py:2) and '/usr/c.py'"
    assert user_code.displayed(text) == "in pkg/a.py:1, (jax/b.py:2) and '/usr/c.py'"


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_ends_with_one_clear_message(workspace: Path, case: str) -> None:
    changes, text = WRONG[case]
    status, stderr, output = export(workspace, spec(**changes))
    assert _without_marks(stderr) == text
    assert status == 2
    assert not output.parent.exists() or list(output.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"entry": "pkg.model:data_dependent"}, ["raised TracerBoolConversionError", 'model.py", line 27']),
        ({"entry": "pkg.model:reshaped", "args": ["f32[b,3]"]}, ["model.py", "line 33", "'b'"]),
    ],
)
def test_mistakes_that_jax_words(workspace: Path, changes: dict[str, Any], parts: list[str]) -> None:
    status, stderr, output = export(workspace, spec(**changes))
    assert status == 2
    assert not output.exists()
    assert "Traceback" not in stderr
    assert "frontends" not in stderr
    for part in parts:
        assert part in stderr


def test_static_arguments_are_bound(workspace: Path) -> None:
    status, stderr, output = export(workspace, spec(entry="pkg.model:scaled", static={"by": 3.0, "steps": 2}))
    assert (status, stderr) == (0, "")
    exported = jax.export.deserialize(bytearray(output.read_bytes()))
    assert float(exported.call(jax.numpy.ones((2, 3)))[0, 0]) == 9


def test_keyword_avals_from_a_callable(workspace: Path) -> None:
    _, stderr, output = export(workspace, spec(args=[], avals="pkg.model:kwarg_avals"))
    assert stderr == ""
    assert Exported.deserialize(output.read_bytes()).in_tree.to_json() == {
        "tuple": [{"tuple": []}, {"dict": {"x": "*"}}]
    }


def test_example_inputs_that_are_there(workspace: Path) -> None:
    """Arrays stand for their dtypes and shapes."""
    _, stderr, output = export(workspace, spec(entry="pkg.model:gathered_too", args=[], avals="pkg.model:EXAMPLE"))
    assert stderr == ""
    assert [str(aval) for aval in Exported.deserialize(output.read_bytes()).in_avals] == [
        "f32[2,3]",
        "f32[4]",
        "f32[4]",
    ]


def test_a_description_has_the_names_of_parameters(workspace: Path) -> None:
    given = spec(
        entry="pkg.model:gathered",
        args=["f32[3]", "f32[4]", "f32[4]"],
        kwargs={"scale": "f32[]"},
        donate_argnums=[1],
        donate_argnames=["x", "scale"],
    )
    (workspace / "f.spec").write_text(to_json(given))
    words = (
        "action",
        "export",
        "--spec",
        "f.spec",
        "--output",
        "f.exported",
        "--description",
        "f.json",
        "--import-root",
        ".",
    )
    done = stagec(*words, cwd=workspace)
    assert done.returncode == 0, done.stderr  # JAX warns that it cannot reuse a scalar
    described = json.loads((workspace / "f.json").read_text())
    assert described["parameters"] == ["x", "*rest"]
    assert described["donated"] == ["args[0]", "args[1]", "kwargs['scale']"]


def test_an_entry_that_is_already_jitted(workspace: Path) -> None:
    _, stderr, output = export(workspace, spec(entry="pkg.model:already"))
    assert stderr == ""
    assert Exported.deserialize(output.read_bytes()).fun_name == "double"


def test_every_key_reaches_the_artifact(workspace: Path) -> None:
    changes = {"platforms": ["cpu", "tpu"], "args": ["f32[b,3]"], "constraints": ["b <= 8"], "vjp_order": 2}
    _, stderr, output = export(workspace, spec(**changes))
    assert stderr == ""
    exported = Exported.deserialize(output.read_bytes())
    assert exported.platforms == ("cpu", "tpu")
    assert exported.vjp().has_vjp()
    assert not exported.vjp().vjp().has_vjp()
    assert [str(aval) for aval in exported.in_avals] == ["f32[b,3]"]


def test_bytes_depend_on_the_function_alone(workspace: Path, tmp_path: Path) -> None:
    """Another folder, comments, other line numbers, another hash seed: the same bytes."""
    _, _, output = export(workspace, spec())
    first = output.read_bytes()
    (tmp_path / "pkg").mkdir()
    moved = "# a comment\n\n" + MODEL.replace("return 2 * x", "# doubles\n    return 2 * x")
    (tmp_path / "pkg" / "model.py").write_text(moved)
    (tmp_path / "f.spec").write_text(to_json(spec()))
    arguments = ("action", "export", "--spec", "f.spec", "--output", "f.exported", "--import-root", ".")
    done = stagec(*arguments, cwd=tmp_path, env={"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "HOME": str(tmp_path)})
    assert done.stderr == ""
    assert (tmp_path / "f.exported").read_bytes() == first


CHECKPOINTED = """
import jax


def keep_all(primitive, *avals, **params):
    return True


def f(x):
    return jax.checkpoint(lambda y: (y @ y.T).sum(), policy=keep_all)(x)
"""


def test_a_jaxpr_depends_on_the_function_alone(tmp_path: Path) -> None:
    texts = []
    for folder, model, seed in (("a", CHECKPOINTED, "0"), ("b", "# A comment.\n" + CHECKPOINTED, "7")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.py").write_text(model)
        (tmp_path / folder / "f.spec").write_text(to_json(spec(entry="model:f")))
        arguments = ("action", "jaxpr", "--spec", "f.spec", "--output", "f.jaxpr.txt", "--import-root", ".")
        done = stagec(*arguments, cwd=tmp_path / folder, env={"PYTHONHASHSEED": seed})
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        texts.append((tmp_path / folder / "f.jaxpr.txt").read_text())
    assert texts[0] == texts[1]
    assert texts[0].startswith("{ lambda ; a:f32[2,3]. let\n")
    assert "policy=<function keep_all>\n" in texts[0]


def test_a_module_has_no_jaxpr(tmp_path: Path) -> None:
    (tmp_path / "f.spec").write_text(to_json(spec(entry="f.mlir")))
    done = stagec("action", "jaxpr", "--spec", "f.spec", "--output", "f.jaxpr.txt", cwd=tmp_path)
    assert done.stderr == "pkg/m.toml: functions.f.entry: f.mlir is a StableHLO module, and has no jaxpr\n"
    assert done.returncode == 2


_IMPORTED = """
import json, sys
from stagec.cli import main
status = main(sys.argv[1:])
print(json.dumps([status, sorted(name for name in sys.modules if name.split(".")[0] in ("pydantic", "stagec"))]))
"""


def test_exporting_imports_no_planner(workspace: Path) -> None:
    """A plan may change without another trace: the description is written without it."""
    (workspace / "f.spec").write_text(to_json(spec()))
    words = [
        "action",
        "export",
        "--spec",
        "f.spec",
        "--output",
        "f.exported",
        "--description",
        "f.json",
        "--import-root",
        ".",
    ]
    done = subprocess.run(
        [sys.executable, "-B", "-c", _IMPORTED, *words],
        cwd=workspace,
        env=action_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    status, modules = json.loads(done.stdout)
    assert status == 0
    assert [name for name in modules if name.startswith(("pydantic", "stagec.manifest"))] == []
