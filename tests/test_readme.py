"""README's example, and the files and commands of docs/bazel.md and docs/with-jax.md, are built and run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from stagec.manifest.workspace import SETTINGS
from tests.building import COMPILER, ROOT, checked
from tests.nested import NestedBazel
from tests.page_blocks import blocks, commands, files

BY_HAND = files("docs/bazel.md", "docs/python-stages.md")
README = files("README.md")
ENTRY = ("MODULE.bazel", "WORKSPACE")


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NestedBazel]:
    folder = tmp_path_factory.mktemp("readme")
    root = folder / "user"
    for name, text in BY_HAND.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    # Debian's package of Bazel 4 logs its sandbox without this option.
    (root / ".bazelrc").write_text("build --nosandbox_debug\n")
    bazel = NestedBazel(folder, root)
    try:
        yield bazel
    finally:
        bazel.run("shutdown")


def ran(script: str, user: NestedBazel) -> str:
    """What a script of the workspace prints, where stagec and the packages of the build are."""
    env = {"PYTHONPATH": os.pathsep.join([str(COMPILER), str(user.fetched()["stagec_python"] / "site-packages")])}
    words = [sys.executable, "-B", "-s", script]
    done = subprocess.run(words, cwd=user.root, env=env, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout


def test_the_pages_name_their_files() -> None:
    assert sorted(README) == ["models/models.toml", "models/net.py", "serve.py"]
    assert sorted(BY_HAND) == [
        "MODULE.bazel",
        "WORKSPACE",
        "models/BUILD",
        "models/models.toml",
        "models/scale.py",
        "requirements.in",
        "stages.py",
    ]


@pytest.mark.pinned
def test_what_is_written_by_hand_builds(user: NestedBazel) -> None:
    printed = {}
    for line in commands("docs/bazel.md"):
        program, command, *arguments = shlex.split(line)
        assert program == "bazel"
        done = user.run(command, *arguments)
        assert done.returncode == 0, done.stderr
        printed[command] = done.stdout
    assert "requirements.lock: " in printed["run"]
    assert "\nflax==" in (user.root / "requirements.lock").read_text()
    assert sorted(printed["query"].split()) == [
        "//models:models",
        "//models:models.container",
        "//models:models.explain",
        "//models:models.image",
        "//models:models.imports",
        "//models:models.latency",
        "//models:models.provenance",
        "//models:models.push",
        "//models:models.report",
        "//models:models.reproducibility_test",
        "//models:models.scale",
        "//models:models.scale.cpu-avx2.batch1",
        "//models:models.scale.cpu-avx2.batch32",
        "//models:models.serve",
        "//models:models.sign",
        "//models:models.update_baseline",
    ]
    assert ran("stages.py", user) == "[2. 2. 2.] 3.0\n"


@pytest.mark.pinned
def test_a_program_with_jax_finds_what_was_built(user: NestedBazel) -> None:
    """The section of the compilation cache, from its first block to its last."""
    page = [*blocks("docs/with-jax.md")]
    printed = [text for language, text in page if language == "text"]
    cache = files("docs/with-jax.md")
    before = (user.root / "models/models.toml").read_text()
    assert cache["models/models.toml"].replace("jax_cache = true\n", "") == before
    for name in ("models/models.toml", "serve_jax.py"):
        (user.root / name).write_text(cache[name])
    lines = [line for language, text in page if language == "sh" for line in text.splitlines()]
    assert [line.split()[0] for line in lines] == ["bazel", "python3", "JAX_LOGGING_LEVEL=DEBUG", "python3"]
    built = user.run(*shlex.split(lines[0])[1:])
    assert built.returncode == 0, built.stderr
    assert ran("serve_jax.py", user) == printed[0]
    path = [str(COMPILER), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}

    def shell(line: str) -> subprocess.CompletedProcess[str]:
        typed = line.replace("python3", f"{sys.executable} -B -s")
        return subprocess.run(typed, shell=True, cwd=user.root, env=env, capture_output=True, text=True)

    assert re.fullmatch("[0-9a-f]{16}\n", shell(lines[1]).stdout)
    assert shell(lines[2]).returncode == 0
    assert (shell(lines[3]).returncode, shell(lines[3]).stdout) == (0, "2 of 2 found\n")
    program = user.root / "serve_jax.py"
    program.write_text(program.read_text().replace("(1, 32)", "(1, 8)"))
    assert shell(lines[2]).returncode == 0
    assert (shell(lines[3]).returncode, shell(lines[3]).stdout) == (1, f"{printed[1]}1 of 2 found\n")
    (user.root / "models/models.toml").write_text(before)


MODEL = """\
import jax.numpy as jnp


def predict(params, images):
    return jnp.tanh(images @ params["kernel"])


def predict_example_inputs():
    return {"kernel": jnp.zeros((4, 3))}, jnp.zeros((2, 4))
"""


@pytest.fixture
def emptied(user: NestedBazel) -> Iterator[NestedBazel]:
    """The same workspace, and its Bazel and its packages, with none of the files."""
    kept = user.root.with_name("kept")
    user.root.rename(kept)
    (user.root / "models").mkdir(parents=True)
    try:
        yield user
    finally:
        shutil.rmtree(user.root)
        kept.rename(user.root)


def next_command(said: str) -> list[str]:
    """The command of Bazel that `init` prints last."""
    program, *words = shlex.split(said.splitlines()[-1])
    assert program in ("bazel", "bazelisk", os.environ.get("BAZEL"))
    return words


def test_the_readme(emptied: NestedBazel) -> None:
    """Its function, from a folder with nothing else to the result of a call."""
    root = emptied.root
    for name in ("models/net.py", "serve.py"):
        (root / name).write_text(README[name])
    (init,) = re.findall(r"^    \./bazelw (run //:init .*)$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    # In the clone: an empty folder has no @stagec.
    done = emptied.run(*init.replace("../mine", str(root)).split(), cwd=root.with_name("stagec"))
    assert done.returncode == 0, done.stderr
    assert "written   models/models.toml\nwritten   models/BUILD\nwritten   " in done.stdout
    assert (root / "models" / "models.toml").read_text() == README["models/models.toml"].partition("\n")[2]
    assert 'path = "../stagec"' in "".join((root / name).read_text() for name in ENTRY if (root / name).exists())
    assert (root / ".bazelrc").read_text() == SETTINGS  # which Bazel takes
    assert [["bazel", *next_command(done.stdout)]] == [line.split() for line in commands("README.md")]
    built = emptied.run(*next_command(done.stdout))
    assert built.returncode == 0, built.stderr
    text = checked("inspect", root / "bazel-bin" / "models" / "models.aot")
    assert "    params.hidden  f32[784,128]\n" in text
    assert ran("serve.py", emptied) == "(32, 10)\n"
    table = (ROOT / "README.md").read_text("utf-8").partition("\n## What you get\n")[2].partition("\n## ")[0]
    targets = ["//models", *re.findall(r"`bazel build (\S+)`", table)]
    built = emptied.run("build", *targets)
    assert built.returncode == 0, built.stderr
    shown = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(shown) == 5
    assert [name for name in shown if not (root / "bazel-bin" / "models" / name).is_file()] == []


@pytest.mark.pinned  # test_the_readme has what init writes with another Bazel
def test_init_in_a_workspace_that_has_stagec(user: NestedBazel) -> None:
    before = {path: path.read_text() for path in user.root.rglob("*") if path.is_file() and not path.is_symlink()}
    (user.root / "nets").mkdir()
    (user.root / "nets" / "net.py").write_text(MODEL)
    try:
        for arguments in (
            ["nets/net.py:predict"],
            ["models/scale.py:scale", '--args=[{ factor = "f32[3]" }, "f32[4,3]"]'],
        ):
            done = user.run("run", "@stagec//:init", "--", *arguments)
            said = done.stdout + done.stderr
            if arguments[0].startswith("models"):
                assert 'models/models.toml: functions.scale: the manifest has a function "scale" already' in said
                continue
            assert done.returncode == 0, said
            built = user.run(*next_command(done.stdout))
            assert built.returncode == 0, built.stderr
        after = {path: path.read_text() for path in before}
        assert [path for path in before if not after[path].startswith(before[path])] == []
        changed = [path.name for path in before if after[path] != before[path]]
        assert sorted(changed) in (["WORKSPACE"], ["MODULE.bazel"], ["MODULE.bazel", "WORKSPACE"])
        built = user.run("build", "//models")  # nothing of the others is broken
        assert built.returncode == 0, built.stderr
    finally:
        shutil.rmtree(user.root / "nets")
        for path, text in before.items():
            path.write_text(text)


@pytest.mark.pinned
def test_the_error_shown_is_the_error_printed(user: NestedBazel) -> None:
    (shown,) = (text for _, text in blocks("docs/manifest.md") if "missing" in text)
    manifest = user.root / "models" / "models.toml"
    good = manifest.read_text()
    manifest.write_text(good.replace('"f32[batch,3]"', '"f32[batch,3"'))
    try:
        said = user.run("build", "//models").stderr
    finally:
        manifest.write_text(good)
    assert shown in said
