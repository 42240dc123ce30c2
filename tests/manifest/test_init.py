"""`stagec init` without Bazel: what it finds out of a file, what it writes, and what it leaves alone."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from tests.building import ROOT, stagec

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
        written   MODULE.bazel

        Next:
          ../stagec/bazelw build //models
        """)
    assert (tmp_path / "models" / "BUILD").read_text() == dedent("""\
        load("@models_manifest//:defs.bzl", "aot_manifest")
        aot_manifest(name = "models", deps = glob(["*.py"]))
        """)
    assert "\nstartup --host_jvm_args=-XX:TieredStopAtLevel=1\n" in (tmp_path / ".bazelrc").read_text()
    # README's, line by line.
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"# MODULE.bazel\n{(tmp_path / 'MODULE.bazel').read_text()}" in readme
    assert f"# models/BUILD\n{(tmp_path / 'models' / 'BUILD').read_text()}" in readme


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
            # Or name a function of models/net.py that returns them, as jax.eval_shape does:
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
    planned = stagec("plan", "models/models.toml", cwd=tmp_path)
    assert (planned.returncode, planned.stderr) == (0, "")
    done = init(tmp_path, "models/net.py:other")
    assert (
        "First:\n  models/models.toml: write dtypes and shapes of x: models/net.py does not say them\n" in done.stdout
    )
    planned = stagec("plan", "models/models.toml", cwd=tmp_path)
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
            'my-net.py: "my-net" cannot be imported: it is no name in Python\n  call it "my_net"\n',
        ),
        (
            ["../net.py:predict"],
            "../net.py: it is not in the workspace ROOT\n  name the workspace with --workspace\n",
        ),
        (["net.py:predict", "--workspace", "nowhere"], "nowhere: no such folder\n  make it, or name another one\n"),
        (["models/net.py:predict", "--args", "f32[3]"], "--args: not a value of TOML: "),
        (["models/net.py:predict", "--args", '"f32[3]"'], "--args: a list is wanted, with a tree of avals for each"),
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
