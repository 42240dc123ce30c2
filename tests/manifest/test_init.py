"""`stagec init` without Bazel: what it finds out of a file, what it writes, and what it leaves alone.

Modules: `cli/init.py`, `core/builds/distributions.py`, `manifest/inference.py`, `manifest/workspace.py`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from tests.building import COMPILER, ROOT, stagec

HEAD = '[manifest]\nname = "models"\nversion = "0.1.0"\n\n'


def init(root: Path, *words: str, files: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a workspace with these files, for a Bazel that is not there."""
    for name, text in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(dedent(text))
    return stagec("init", *words, cwd=root, path="/nowhere")


def written(root: Path, source: str, *words: str, function: str = "predict") -> str:
    """The manifest for a function of a file with this source, without its head."""
    done = init(root, f"models/net.py:{function}", *words, files={"models/net.py": source})
    assert done.returncode == 0, done.stderr
    text = (root / "models" / "models.toml").read_text()
    assert text.startswith(HEAD)
    return text.removeprefix(HEAD)


def test_the_files_of_an_empty_workspace(tmp_path: Path) -> None:
    source = "def predict(x: Float[Array, 'batch 784']): ..."
    done = init(tmp_path, "models/net.py:predict", "--stagec", "../stagec", files={"models/net.py": source})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == dedent("""\
        written   models/models.toml
        written   models/BUILD
        written   .bazelrc
        written   .gitignore
        written   MODULE.bazel

        Next:
          ../stagec/bazelw build //models
        """)
    assert (tmp_path / "models" / "BUILD").read_text() == dedent("""\
        load("@models_manifest//:defs.bzl", "aot_manifest")
        aot_manifest(name = "models", deps = glob(["*.py"]))
        """)
    assert "\nstartup --host_jvm_args=-XX:TieredStopAtLevel=1\n" in (tmp_path / ".bazelrc").read_text()
    page = (ROOT / "docs" / "bazel.md").read_text("utf-8")
    assert f"# MODULE.bazel\n{(tmp_path / 'MODULE.bazel').read_text()}" in page
    assert f"# models/BUILD\n{(tmp_path / 'models' / 'BUILD').read_text()}" in page


def test_the_manifest_that_readme_shows(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = dict(re.findall(r"^```\w+\n# (models/\S+)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL))
    done = init(tmp_path, "models/net.py:predict", files={"models/net.py": shown["models/net.py"]})
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "models" / "models.toml").read_text() == shown["models/models.toml"]


def test_a_workspace_beside_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    net = {"../mine/models/net.py": "def predict(x: Float[Array, 'batch 784']): ..."}
    done = init(tmp_path / "checkout", "--workspace", "../mine", "models/net.py:predict", files=net)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "mine" / "models" / "models.toml").is_file()


@pytest.mark.parametrize(
    ("source", "table"),
    [
        (
            "def predict(x): ...\n\n\ndef predict_avals(): ...",
            'avals = "models.net:predict_avals"\n',
        ),
        (
            """
            def predict(x): ...

            def predict_avals():
                return (jax.ShapeDtypeStruct(symbolic_shape("batch, 2*seq", scope=scope), "float32"),)
            """,
            'avals = "models.net:predict_avals"\n'
            "# One executable for each of these sizes.\nbuckets = { batch = [1, 32], seq = [16] }\n",
        ),
        ("example_inputs = (1, 2)\ndef predict(x): ...", 'avals = "models.net:example_inputs"\n'),
        (
            """
            def predict(
                x: Float[Array, "batch 3"],
                k: jaxtyping.Int8[jax.Array, "*"] = None,
                *,
                key: PRNGKeyArray,
                mask: 'Bool[Array, "batch"]',
                scale: float = 1.0,
            ): ...
            """,
            'args = ["f32[batch,3]"]\nkwargs = { key = "key<fry>[]", mask = "bool[batch]" }\n'
            "# One executable for each of these sizes.\nbuckets = { batch = [1, 32] }\n",
        ),
        (
            'def predict(xs: tuple[BFloat16[Array, "#n dim=4 2*m"], Key[Array, ""]], n: int): ...',
            'args = [["bf16[n,4,2*m]", "key<fry>[]"], "i32[]"]\n'
            "# One executable for each of these sizes.\nbuckets = { m = [16], n = [1, 32] }\n",
        ),
        ("def forward(n: int): ...\n\npredict = jax.jit(forward, donate_argnums=0)", 'args = ["i32[]"]\n'),
        (
            'def predict(params, x: Float[Array, "4"], rng): ...',
            """\
            # models/net.py does not say what params, rng are. Write dtype and shape
            # of each, or a table of them for a dict, and take the # away:
            # args = [
            #   { kernel = "f32[784,10]", bias = "f32[10]" },  # params
            #   "f32[4]",  # x
            #   "key<fry>[]",  # rng
            # ]
            # buckets = { batch = [1, 32] }
            # Or name a function of models/net.py that returns them, as jax.eval_shape does. Numbers in it are
            # arguments too, as in jax.jit; what must stay constant goes into static:
            # avals = "models.net:predict_avals"
            """,
        ),
    ],
    ids=["avals", "dimensions", "example inputs", "annotations", "a tuple", "jit", "nothing"],
)
def test_what_a_file_says_of_the_arguments(tmp_path: Path, source: str, table: str) -> None:
    expected = f'[functions.predict]\nentry = "models.net:predict"\n{dedent(table)}targets = ["cpu-avx2"]\n'
    assert written(tmp_path, source) == expected


def test_arguments_that_are_given(tmp_path: Path) -> None:
    given = '[{ w = "f32[3]" }, "f32[batch,3]"]'
    assert written(tmp_path, "def predict(params, x): ...", "--args", given) == (
        f'[functions.predict]\nentry = "models.net:predict"\nargs = {given}\n'
        '# One executable for each of these sizes.\nbuckets = { batch = [1, 32] }\ntargets = ["cpu-avx2"]\n'
    )


def test_what_is_written_is_a_manifest(tmp_path: Path) -> None:
    """Also before its arguments are known: then the plan says so."""
    written(tmp_path, 'def predict(x: Float[Array, "batch 3"], *, key: PRNGKeyArray): ...\ndef other(x): ...')
    planned = stagec("action", "plan", "models/models.toml", cwd=tmp_path)
    assert (planned.returncode, planned.stderr) == (0, "")
    done = init(tmp_path, "models/net.py:other")
    assert (
        "First:\n  models/models.toml: write dtypes and shapes of x: models/net.py does not say them\n" in done.stdout
    )
    planned = stagec("action", "plan", "models/models.toml", cwd=tmp_path)
    assert "models/models.toml: functions.other: nothing says what the arguments are" in planned.stderr


def test_libraries_are_those_of_the_imports(tmp_path: Path) -> None:
    files = {
        "models/net.py": """
            from __future__ import annotations
            import os, jax.numpy as jnp, numpy as np
            from typing import TYPE_CHECKING
            import flax.linen as nn
            from models import layers
            from .more import deep
            if TYPE_CHECKING:
                import pandas
            def predict(n: int):
                import sklearn.svm
            """,
        "models/layers.py": "import optax",
        "models/more/deep.py": "import einops",
    }
    done = init(tmp_path, "models/net.py:predict", files=files)
    assert "First:\n  bazel run @stagec//:lock -- requirements.in\n" in done.stdout
    lines = (tmp_path / "requirements.in").read_text().splitlines()
    assert lines == ["einops", "flax", "optax", "scikit-learn"]
    assert 'stagec.python(lock = "//:requirements.lock")\n' in (tmp_path / "MODULE.bazel").read_text()
    assert (tmp_path / "BUILD").read_text() == ""
    assert 'deps = glob(["**/*.py"])' in (tmp_path / "models" / "BUILD").read_text()


def test_files_of_other_folders(tmp_path: Path) -> None:
    files = {
        "models/net.py": "import common.norm, owned.layers.dense, beside\ndef predict(n: int): ...",
        "models/beside.py": "",
        "common/norm.py": "",
        "owned/BUILD": "# mine\n",
        "owned/layers/dense.py": "",
    }
    done = init(tmp_path, "models/net.py:predict", files=files)
    assert done.returncode == 0, done.stderr
    assert '\nAdd this to owned/BUILD:\n  exports_files(["layers/dense.py"])\n' in done.stdout
    assert (tmp_path / "owned" / "BUILD").read_text() == "# mine\n"
    assert (tmp_path / "common" / "BUILD").read_text() == 'exports_files(glob(["*.py"]))\n'
    rule = 'deps = glob(["*.py"]) + ["//common:norm.py", "//owned:layers/dense.py"], imports = ["."])'
    assert rule in (tmp_path / "models" / "BUILD").read_text()


MINE = {
    "MODULE.bazel": """\
        module(name = "mine")
        bazel_dep(name = "platforms", version = "1.0.0")
        bazel_dep(name = "stagec", version = "0.1.0")
        aot = use_extension("@stagec//rules:extensions.bzl", "stagec")
        aot.python(lock = "//third_party:all.lock")""",
    "models/BUILD": 'filegroup(name = "models")\n',
    "models/net.py": "import flax, optax\ndef predict(n: int): ...\ndef train(n: int): ...",
    "third_party/all.lock": "flax==0.12\n",
    "third_party/all.in": "flax\n",
}


def test_nothing_of_an_existing_workspace_is_overwritten(tmp_path: Path) -> None:
    done = init(tmp_path, "models/net.py:predict", files=MINE)
    assert done.returncode == 0, done.stderr
    for name, text in MINE.items():
        assert (tmp_path / name).read_text().startswith(dedent(text)), name
    assert not (tmp_path / ".bazelrc").exists()  # settings of Bazel are those of its people
    added = (tmp_path / "MODULE.bazel").read_text().removeprefix(dedent(MINE["MODULE.bazel"]))
    assert added == (
        '\n\naot.manifest(name = "models_aot_manifest", manifest = "//models:models_aot.toml")\n'
        'use_repo(aot, "models_aot_manifest")\n'
    )
    assert (
        (tmp_path / "models" / "BUILD")
        .read_text()
        .endswith(
            '\nload("@models_aot_manifest//:defs.bzl", "aot_manifest")\n'
            'aot_manifest(name = "models_aot", deps = glob(["*.py"]))\n'
        )
    )
    assert (tmp_path / "third_party" / "all.in").read_text() == "flax\n\noptax\n"
    assert "bazel run @stagec//:lock -- third_party/all.in\n" in done.stdout
    assert done.stdout.endswith("bazelw build //models:models_aot\n")


def test_an_entry_point_without_stagec_is_left_to_its_owner(tmp_path: Path) -> None:
    mine = 'module(name = "mine")\nbazel_dep(name = "platforms", version = "1.0.0")\n'
    files = {"MODULE.bazel": mine, "models/net.py": "def predict(n: int): ..."}
    done = init(tmp_path, "models/net.py:predict", "--stagec", "../stagec", files=files)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == dedent("""\
        written   models/models.toml
        written   models/BUILD

        Add this to MODULE.bazel:
          bazel_dep(name = "stagec", version = "0.1.0")
          local_path_override(module_name = "stagec", path = "../stagec")
          stagec = use_extension("@stagec//rules:extensions.bzl", "stagec")
          stagec.manifest(name = "models_manifest", manifest = "//models:models.toml")
          use_repo(stagec, "models_manifest")

        Next:
          ../stagec/bazelw build //models
        """)
    assert (tmp_path / "MODULE.bazel").read_text() == mine


def test_a_build_file_with_the_targets_of_another_manifest(tmp_path: Path) -> None:
    """A file cannot load two macros under one name."""
    mine = 'load("@deep_manifest//:defs.bzl", "aot_manifest")\naot_manifest(name = "deep")\n'
    files = {"models/BUILD": mine, "models/net.py": "def predict(n: int): ..."}
    assert init(tmp_path, "models/net.py:predict", files=files).returncode == 0
    assert (tmp_path / "models" / "BUILD").read_text() == mine + dedent("""
        load("@models_manifest//:defs.bzl", models_targets = "aot_manifest")
        models_targets(name = "models", deps = glob(["*.py"]))
        """)


def test_a_manifest_that_is_not_toml(tmp_path: Path) -> None:
    files = {"models/models.toml": "[manifest]\nname = models\n", "models/net.py": "def predict(n: int): ..."}
    done = init(tmp_path, "models/net.py:predict", files=files)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("models/models.toml: not a manifest: Invalid value (at line 2, column 8)")


def test_a_second_function_joins_the_first(tmp_path: Path) -> None:
    assert init(tmp_path, "models/net.py:predict", files=MINE).returncode == 0
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    done = init(tmp_path, "models/net.py:train")
    assert done.returncode == 0, done.stderr
    changed = [path.name for path, text in before.items() if path.read_text() != text]
    assert changed == ["models_aot.toml"]
    again = init(tmp_path, "models/net.py:train")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == (
        'models/models_aot.toml: functions.train: the manifest has a function "train" already\n  change it there\n'
    )


@pytest.mark.parametrize("train", ["models/train.py", "other/train.py"])
def test_a_second_function_declares_the_lock_of_what_it_imports(tmp_path: Path, train: str) -> None:
    """Of the same manifest or of another one: the first function needed no package."""
    files = {"models/net.py": "def predict(n: int): ...", train: "import optax\ndef train(n: int): ..."}
    assert "lock" not in init(tmp_path, "models/net.py:predict", files=files).stdout
    done = init(tmp_path, f"{train}:train")
    assert "First:\n  bazel run @stagec//:lock -- requirements.in\n" in done.stdout
    declared = (tmp_path / "MODULE.bazel").read_text()
    assert declared.count('stagec.python(lock = "//:requirements.lock")\n') == 1
    assert (tmp_path / "BUILD").is_file()
    again = init(tmp_path, f"{train}:train", "--name", "again")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "MODULE.bazel").read_text() == declared


@pytest.mark.parametrize(
    ("file", "before", "told"),
    [
        (
            "MODULE.bazel",
            'aot = use_extension("@stagec//rules:extensions.bzl", "stagec")\naot.python(interpreter = "/python")\n'
            'aot.environment(name = "mine", lock = "//:mine.lock")\n',
            'lock = "//:requirements.lock",  # in aot.python(...)',
        ),
        (
            "WORKSPACE",
            'local_repository(name = "stagec", path = "../stagec")\n'
            'load("@stagec//rules:repositories.bzl", "stagec_manifest", "stagec_repositories")\n'
            "stagec_repositories()\n",
            'lock = "//:requirements.lock",  # in stagec_repositories(...)',
        ),
    ],
)
def test_a_lock_that_no_line_at_the_end_declares_is_told(tmp_path: Path, file: str, before: str, told: str) -> None:
    files = {file: before, "models/net.py": "import optax\ndef predict(n: int): ..."}
    done = init(tmp_path, "models/net.py:predict", files=files)
    assert f"\nAdd this to {file}:\n  {told}\n" in done.stdout
    assert (tmp_path / file).read_text().startswith(before)
    assert "requirements.lock" not in (tmp_path / file).read_text()


def test_a_second_function_that_imports_other_files_says_what_deps_lack(tmp_path: Path) -> None:
    files = {
        "models/net.py": "def predict(n: int): ...",
        "models/train.py": "import beside, common.norm, models.deep.layers\ndef train(n: int): ...",
        "models/beside.py": "",
        "models/deep/layers.py": "",
        "common/norm.py": "",
    }
    assert init(tmp_path, "models/net.py:predict", files=files).returncode == 0
    done = init(tmp_path, "models/train.py:train")
    assert (
        "\nAdd this to models/BUILD:\n"
        '  deps = ... + glob(["**/*.py"]) + ["//common:norm.py"], imports = ["."]  # in aot_manifest\n'
    ) in done.stdout


def test_several_functions_at_once(tmp_path: Path) -> None:
    files = {
        "models/net.py": "def predict(n: int): ...\ndef embed(x): ...",
        "other/net.py": "import optax, sklearn\ndef predict(n: int): ...",
    }
    words = ("models/net.py:predict", "models/net.py:embed", "other/net.py:predict", "--stagec", "../stagec")
    done = init(tmp_path, *words, files=files)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == dedent("""\
        written   models/models.toml
        written   models/BUILD
        written   .bazelrc
        written   .gitignore
        written   MODULE.bazel
        written   other/other.toml
        written   other/BUILD
        written   requirements.in
        written   BUILD

        First:
          bazel run @stagec//:lock -- requirements.in
          models/models.toml: write dtypes and shapes of x: models/net.py does not say them

        Then:
          ../stagec/bazelw build //models //other
        """)
    assert (tmp_path / "models" / "models.toml").read_text().count("[functions.") == 2
    assert (tmp_path / "requirements.in").read_text() == "optax\nscikit-learn\n"
    module = (tmp_path / "MODULE.bazel").read_text()
    assert [module.count(line) for line in ("use_extension(", ".python(", ".manifest(")] == [1, 1, 2]


def test_another_name_for_a_second_function_of_the_same_name(tmp_path: Path) -> None:
    files = {"models/net.py": "def predict(n: int): ...", "models/tree.py": "def predict(n: int): ..."}
    assert init(tmp_path, "models/net.py:predict", files=files).returncode == 0
    taken = (
        'models/models.toml: functions.predict: the manifest has a function "predict" already, models.net:predict\n'
        "  give this one another name: --name tree_predict\n"
    )
    done = init(tmp_path, "models/tree.py:predict")
    assert (done.returncode, done.stderr) == (2, taken)
    assert init(tmp_path, "models/tree.py:predict", "--name", "tree_predict").returncode == 0
    table = '[functions.tree_predict]\nentry = "models.tree:predict"\n'
    assert table in (tmp_path / "models" / "models.toml").read_text()
    assert stagec("action", "plan", "models/models.toml", cwd=tmp_path).returncode == 0
    wrong = init(tmp_path, "models/tree.py:predict", "--name", "a b")
    assert (
        wrong.stderr
        == '--name: "a b" is not a name\n  write letters, digits, _ and -, not starting with a digit or -\n'
    )


def test_two_of_one_name_at_once_write_nothing(tmp_path: Path) -> None:
    files = {"models/net.py": "def predict(n: int): ...", "models/tree.py": "def predict(n: int): ..."}
    done = init(tmp_path, "models/net.py:predict", "models/tree.py:predict", files=files)
    assert (done.returncode, "--name tree_predict" in done.stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["net.py", "tree.py"]
    several = init(tmp_path, "models/net.py:predict", "models/tree.py:predict", "--name", "x")
    assert several.stderr == "--name: it is about one function, and 2 are named\n  run the command once for each\n"


def test_a_package_of_another_name_than_its_module(tmp_path: Path) -> None:
    source = """
        import cv2, sklearn.svm, yaml, PIL.Image, google.protobuf.message, some_library.part, stagec_arrays.numpy
        import tensorflow_probability.substrates.jax as tfp, orbax.export, orbax.checkpoint
        def predict(n: int): ...
        """
    init(tmp_path, "models/net.py:predict", files={"models/net.py": source})
    assert (tmp_path / "requirements.in").read_text().split("\n#? ")[0].split() == [
        "opencv-python-headless",
        "orbax-checkpoint",
        "orbax-export",
        "pillow",
        "protobuf",
        "pyyaml",
        "scikit-learn",
        "tensorflow-probability",
    ]


QUESTION = (
    '#? {0}: models/net.py imports it. Write here "PACKAGE  # {0}", the package that brings it; for a module of '
    "your own, delete this line, and name its files in deps of aot_manifest\n"
)


def test_a_module_that_no_package_is_known_to_bring_is_asked_for(tmp_path: Path) -> None:
    """The package of its name may be anybody's: aqt, of aqtp, is a program for flash cards on an index."""
    source = "import aqt.jax, flax, jax\ndef predict(n: int): ...\ndef train(n: int): ..."
    done = init(tmp_path, "models/net.py:predict", files={"models/net.py": source})
    asked = tmp_path / "requirements.in"
    assert asked.read_text() == "flax\n" + QUESTION.format("aqt")
    assert done.stdout.partition("First:\n")[2].splitlines()[:2] == [
        "  requirements.in: write which package brings aqt, as the file says",
        "  bazel run @stagec//:lock -- requirements.in",
    ]
    for answer in (asked.read_text(), "flax\naqtp>=0.8  # aqt\n", "flax\naqt\n"):
        asked.write_text(answer)
        shutil.rmtree(tmp_path / "models")
        done = init(tmp_path, "models/net.py:train", files={"models/net.py": source})
        assert (done.returncode, asked.read_text()) == (0, answer), done.stderr
        assert ("write which package brings aqt" in done.stdout) == answer.endswith("aot_manifest\n")


def test_a_module_that_is_installed_from_an_index_is_known(tmp_path: Path) -> None:
    """But not one that was installed from a folder: it is not what an index has by its name."""
    site = tmp_path / "site-packages"
    for module, package, more in (("aqt", "aqtp", {}), ("ours", "ours", {"direct_url.json": '{"url": "file:///x"}'})):
        for file, text in {"METADATA": f"Name: {package}\n", "top_level.txt": f"{module}\n", **more}.items():
            (site / f"{package}-1.dist-info" / file).parent.mkdir(parents=True, exist_ok=True)
            (site / f"{package}-1.dist-info" / file).write_text(text)
    ask = "import sys; sys.path.append(sys.argv[1]); from stagec.core.builds.distributions import of_import"
    told = [sys.executable, "-B", "-c", f"{ask}; print(of_import('aqt.jax'), of_import('ours'))", site]
    done = subprocess.run(told, env={**os.environ, "PYTHONPATH": str(COMPILER)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "aqtp None\n"), done.stderr


def test_modules_of_the_workspace_are_no_packages_of_others(tmp_path: Path) -> None:
    """Wherever they are: in a namespace package, or where another folder is the one that modules are imported from."""
    files = {
        "models/net.py": "import team.layers, team, optax\nfrom python.nets import mlp\ndef predict(n: int): ...",
        "libs/team/layers.py": "import other_team.norm",
        "shared/other_team/norm.py": "",
        "python/nets/mlp/__init__.py": "",
        "venv/pyvenv.cfg": "",
        "venv/lib/optax/__init__.py": "",
        "build/lib/optax/__init__.py": "",
    }
    done = init(tmp_path, "models/net.py:predict", files=files)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "requirements.in").read_text() == "optax\n"
    labels = ["//libs/team:layers.py", "//python/nets/mlp:__init__.py", "//shared/other_team:norm.py"]
    rule = f'deps = glob(["*.py"]) + {json.dumps(labels)}, imports = ["../libs", "../shared"])\n'
    assert (tmp_path / "models" / "BUILD").read_text().endswith(rule)


@pytest.mark.parametrize(
    ("source", "function", "table"),
    [
        (
            "class Net:\n    def predict(self, x: Float[Array, '3'], n: int): ...\nnet = Net()",
            "net.predict",
            'args = ["f32[3]", "i32[]"]\n',
        ),
        (
            "class Net:\n    @staticmethod\n    def predict(n: int, *, m: int): ...",
            "Net.predict",
            'args = ["i32[]"]\nkwargs = { m = "i32[]" }\n',
        ),
        (
            "class Net:\n    def predict(self, x, /, n): ...\ndef predict_avals(): ...\nnet: Net = Net()",
            "net.predict",
            'avals = "models.net:predict_avals"\n',
        ),
        (
            "from models.nets import Net\nnet = Net()",
            "net.predict",
            "# models/net.py does not say what each argument is. Write dtype and shape\n",
        ),
    ],
    ids=["object", "class", "avals", "elsewhere"],
)
def test_a_method_of_an_object(tmp_path: Path, source: str, function: str, table: str) -> None:
    text = written(tmp_path, source, function=function)
    assert text.startswith(f'[functions.predict]\nentry = "models.net:{function}"\n{table}')


def test_names_that_a_manifest_cannot_have_get_others(tmp_path: Path) -> None:
    """aot_manifest declares targets of these names, so one such function would have the whole package fail to load."""
    names = ("image", "push", "serve", "aot", "predict")
    source = "\n".join(f"def {name}(n: int): ..." for name in names)
    done = init(tmp_path, *(f"models/net.py:{name}" for name in names), files={"models/net.py": source})
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "models" / "models.toml").read_text()
    assert re.findall(r"^\[functions\.(\w+)\]", text, re.MULTILINE) == [
        *("net_image", "net_push", "net_serve", "net_aot", "predict"),
    ]
    assert stagec("action", "plan", "models/models.toml", cwd=tmp_path).returncode == 0
    done = init(tmp_path, "models/more.py:Predict", files={"models/more.py": "def Predict(n: int): ..."})
    assert "give this one another name: --name more_Predict" in done.stderr


def test_data_that_a_file_names(tmp_path: Path) -> None:
    source = """
        import os, pathlib
        import numpy as np
        HERE = pathlib.Path(__file__).parent
        TABLE = np.load(HERE / "tables" / "a.npy")
        WORDS = open("shared/words.txt").read()
        JOINED = os.path.join(os.path.dirname(__file__), "tables", "b.npy")
        OTHERS = "../elsewhere/out.txt", "../../elsewhere/out.txt", "no.txt", "models/net.py", "tables"
        def predict(n: int): return TABLE
        """
    files = {"models/net.py": source, "models/tables/a.npy": "", "models/tables/b.npy": "", "shared/words.txt": ""}
    outside = tmp_path.parent / "elsewhere" / "out.txt"
    outside.parent.mkdir(exist_ok=True)
    outside.touch()
    done = init(tmp_path, "models/net.py:predict", files=files)
    assert (done.returncode, done.stderr) == (0, "")
    rule = 'deps = glob(["*.py"]), data = ["tables/a.npy", "tables/b.npy", "//shared:words.txt"])\n'
    assert (tmp_path / "models" / "BUILD").read_text().endswith(rule)
    assert (tmp_path / "shared" / "BUILD").read_text() == 'exports_files(["words.txt"])\n'


def test_a_file_below_a_folder_that_has_the_name_of_a_module_of_python(tmp_path: Path) -> None:
    files = {"code/models/net.py": "from models import layers\ndef predict(n: int): ...", "code/models/layers.py": ""}
    done = init(tmp_path, "code/models/net.py:predict", files=files)
    assert (done.returncode, done.stderr) == (0, "")
    assert 'entry = "models.net:predict"\n' in (tmp_path / "code" / "models" / "models.toml").read_text()
    rule = 'aot_manifest(name = "models", deps = glob(["*.py"]), imports = [".."])\n'
    assert (tmp_path / "code" / "models" / "BUILD").read_text().endswith(rule)
    done = init(tmp_path, "code/token.py:predict", files={"code/token.py": "def predict(n: int): ..."})
    said = 'code/token.py: "token" cannot be imported: Python has a module of this name\n  give the file another name\n'
    assert (done.returncode, done.stderr) == (2, said)


def test_a_lock_that_has_the_module_of_another_package_lacks_nothing(tmp_path: Path) -> None:
    files = {
        "requirements.in": "Some_Library\n",
        "requirements.lock": "tfp-nightly==0.26.0.dev1 \\\n  --hash=sha256:aa\nSome.Library==1\n",
        "models/net.py": "import tensorflow_probability, some_library\ndef predict(n: int): ...",
    }
    done = init(tmp_path, "models/net.py:predict", files=files)
    assert "First:" not in done.stdout
    assert (tmp_path / "requirements.in").read_text() == "Some_Library\n"


def test_a_workspace_of_an_older_bazel(tmp_path: Path) -> None:
    bazel = tmp_path / "bin" / "bazel"
    bazel.parent.mkdir()
    bazel.write_text("#!/bin/sh\necho bazel no_version\n")  # as Debian's Bazel 4 says
    bazel.chmod(0o755)
    root = tmp_path / "mine"
    (root / "models").mkdir(parents=True)
    (root / "models" / "net.py").write_text("def predict(n: int): ...")
    words = ("init", "models/net.py:predict", "--stagec", "../stagec")
    assert stagec(*words, cwd=root, path=f"{bazel.parent}:/bin").stdout.endswith("Next:\n  bazel build //models\n")
    assert not (root / "MODULE.bazel").exists()
    assert (root / "WORKSPACE").read_text() == dedent("""\
        workspace(name = "mine")
        local_repository(name = "stagec", path = "../stagec")
        load("@stagec//rules:repositories.bzl", "stagec_manifest", "stagec_offline_repositories", "stagec_repositories")
        stagec_offline_repositories()
        stagec_repositories()
        stagec_manifest(name = "models_manifest", manifest = "//models:models.toml")
        """)
    bazel.write_text("#!/bin/sh\necho bazel 7.7.1\n")
    (root / "WORKSPACE").unlink()
    (root / "models" / "models.toml").unlink()
    (root / "models" / "BUILD").unlink()
    assert stagec(*words, cwd=root, path=f"{bazel.parent}:/bin").returncode == 0
    assert (root / "MODULE.bazel").exists()


def test_the_checkout_of_stagec_is_no_workspace_of_models() -> None:
    done = stagec("init", "examples/digits/model.py:predict", cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (f"{ROOT} is stagec's own checkout\n  name the folder of your models: --workspace ../mine\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["models/nett.py:predict"],
            'models/nett.py: cannot be read: No such file or directory\n  did you mean "models/net.py"?\n',
        ),
        (
            ["nowhere/net.py:predict"],
            "nowhere/net.py: cannot be read: No such file or directory\n"
            "  write the path of a Python file, relative to ROOT\n",
        ),
        (["models/net.py:predcit"], 'models/net.py: no function "predcit"\n  did you mean "predict"?\n'),
        (
            ["models/empty.py:predict"],
            'models/empty.py: no function "predict"\n  name a function that stands at the top level of the file\n',
        ),
        (
            ["models/net.txt:predict"],
            "models/net.txt: not a Python file\n  write FILE.py:FUNCTION, such as models/net.py:predict\n",
        ),
        (["models/broken.py:predict"], "models/broken.py: line 1: "),
        (
            ["models/net.py"],
            '"models/net.py" does not name a function\n  write FILE.py:FUNCTION, such as models/net.py:predict\n',
        ),
        (
            ["my-net.py:predict"],
            'my-net.py: "my-net" cannot be imported: it is not a name in Python\n  call it "my_net"\n',
        ),
        (
            ["../net.py:predict"],
            "../net.py: it is not in the workspace ROOT\n  name the workspace with --workspace\n",
        ),
        (["net.py:predict", "--workspace", "nowhere"], "nowhere: no such folder\n  make it, or name another one\n"),
        (["models/net.py:predict", "--args", "f32[3]"], "--args: not a value of TOML: "),
        (["models/net.py:predict", "--args", '"f32[3]"'], "--args: expected a list, with a tree of avals for each"),
    ],
)
def test_wrong_names(tmp_path: Path, words: list[str], said: str) -> None:
    files = {
        "MODULE.bazel": "",
        "models/net.py": "def predict(n: int): ...",
        "models/empty.py": "",
        "models/broken.py": "def predict(:",
        "my-net.py": "def predict(n: int): ...",
    }
    done = init(tmp_path, *words, files=files)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said.replace("ROOT", str(tmp_path)))
    assert len([line for line in done.stderr.splitlines() if not line.startswith(" ")]) == 1
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        Path(name).name for name in files
    )


NET = "def predict(x: Float[Array, 'batch 784']): ..."


@pytest.mark.parametrize("name", ["models/pipe.py", "models/device.py", "models/large.py"])
def test_what_is_no_file_of_a_person_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "models").mkdir()
    os.mkfifo(tmp_path / "models" / "pipe.py")
    (tmp_path / "models" / "device.py").symlink_to("/dev/zero")
    with (tmp_path / "models" / "large.py").open("wb") as file:
        file.truncate(1 << 40)
    done = init(tmp_path, f"{name}:predict")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}: cannot be read: it")
    # Nor what a file imports.
    files = {"models/net.py": f"import models.pipe, models.device, models.large\n{NET}"}
    assert init(tmp_path, "models/net.py:predict", files=files).returncode == 0


@pytest.mark.parametrize("target", ["../outside", "../nowhere", "models/other", "/dev/null", "FIFO"])
@pytest.mark.parametrize("name", ["models/BUILD", "MODULE.bazel", ".bazelrc"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str, target: str) -> None:
    root = tmp_path / "root"
    (root / "models").mkdir(parents=True)
    (tmp_path / "outside").write_text("outside")
    (root / "models" / "other").write_text("other")
    where = str(tmp_path / target[3:]) if target.startswith("..") else target
    if target == "FIFO":
        os.mkfifo(root / name)
    else:
        (root / name).symlink_to(root / where if where.startswith("models") else where)
    done = init(root, "models/net.py:predict", files={"models/net.py": NET})
    if done.returncode:  # else it has nothing to add to it
        assert done.returncode == 2
        what = "it is not a regular file" if target == "FIFO" else f"{root / name} is a link, which is not followed"
        assert done.stderr == f"{name}: cannot be written: {what}\n"
    assert (root / name).is_symlink() or target == "FIFO"
    assert (tmp_path / "outside").read_text() == "outside"
    assert (root / "models" / "other").read_text() == "other"
    assert not (tmp_path / "nowhere").exists()


def test_a_file_that_gets_lines_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    build = tmp_path / "models" / "BUILD"
    build.write_text("# ours")
    build.chmod(0o640)
    assert init(tmp_path, "models/net.py:predict", files={"models/net.py": NET}).returncode == 0
    assert build.read_text().startswith("# ours\n\nload(")
    assert build.stat().st_mode & 0o777 == 0o640


def test_nothing_is_written_in_a_folder_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "net.py").write_text(NET)
    (root / "models").symlink_to(tmp_path / "outside")
    done = init(root, "models/net.py:predict")
    assert done.returncode == 2
    assert done.stderr.endswith(f" cannot be written: {root / 'models'} is a link, which is not followed\n")
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["net.py"]


DEEP = {
    "parentheses": "x = " + "(" * 150 + "1" + ")" * 150,
    "too many parentheses": "x = " + "(" * 5000 + "1" + ")" * 5000,
    "operators": "x = " + "-" * 900 + "1",
    "attributes": "if a" + ".b" * 900 + ":\n    import flax",
    "many attributes": "if a" + ".b" * 100_000 + ":\n    import flax",
    "sums": "x = " + "1 + " * 20_000 + "1",
    "conditions": "if " + "not " * 900 + "TYPE_CHECKING:\n    import flax",
    "blocks": "\n".join(" " * at + "if x:" for at in range(99)) + "\n" + " " * 99 + "import flax",
    "an annotation": "def other(x: " + "tuple[" * 90 + "int" + "]" * 90 + "): ...",
}


@pytest.mark.parametrize("name", DEEP)
def test_python_that_is_nested_deeply(tmp_path: Path, name: str) -> None:
    """It is read, or refused in a sentence; what it is imported by is read all the same."""
    done = init(tmp_path, "models/deep.py:predict", files={"models/deep.py": f"{DEEP[name]}\n{NET}"})
    assert (done.returncode, "Traceback" in done.stderr) in ((0, False), (2, False)), done.stderr
    files = {"mine/net.py": f"import models.deep\n{NET}"}
    assert init(tmp_path, "mine/net.py:predict", files=files).returncode == 0


def test_without_bazel(tmp_path: Path) -> None:
    files = {"models/net.py": "def predict(x: Float[Array, 'batch 784']): ...", "pyproject.toml": ""}
    done = init(tmp_path, "models/net.py:predict", "--bazel", "no", files=files)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == dedent("""\
        written   models/models.toml

        Next:
          stagec build models/models.toml
        """)
    assert 'entry = "models.net:predict"' in (tmp_path / "models" / "models.toml").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "pyproject.toml"]


def test_a_long_chain_of_files(tmp_path: Path) -> None:
    files = {f"models/m{at}.py": f"import models.m{at + 1}\n" for at in range(1500)}
    files |= {"models/m1500.py": "import flax\n", "models/net.py": f"import models.m0\n{NET}"}
    done = init(tmp_path, "models/net.py:predict", files=files)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "requirements.in").read_text() == "flax\n"


def test_what_is_imported_where_no_types_are_checked_counts(tmp_path: Path) -> None:
    source = f"from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    import flax\nelse:\n    import torch\n{NET}"
    assert init(tmp_path, "models/net.py:predict", files={"models/net.py": source}).returncode == 0
    assert "flax" in (tmp_path / "requirements.in").read_text().split()


@pytest.mark.parametrize(
    "text", ["[" * 3000 + "]" * 3000, "[" * 150 + "]" * 150, '["f32[3]"', "{a" + ".a" * 300 + "=1}"]
)
def test_arguments_that_are_no_toml(tmp_path: Path, text: str) -> None:
    done = init(tmp_path, "models/net.py:predict", "--args", text, files={"models/net.py": NET})
    assert done.returncode == 2
    assert done.stderr.startswith("--args: not a value of TOML: ")
