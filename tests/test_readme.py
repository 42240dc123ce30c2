"""README's example is built and run."""

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


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each block of code in a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    """The files of a user's repository, in README and in the pages that it names: a file in two blocks has both."""
    found: dict[str, str] = {}
    for page in ("README.md", "docs/bazel.md", "docs/python.md"):
        for _, text in blocks(page):
            if match := re.match(r"# (\S+)\n", text):
                found[match[1]] = found.get(match[1], "") + text
    return found


FILES = files()
ENTRY = ("MODULE.bazel", "WORKSPACE")
PAGES = ("README.md", "docs/bazel.md")
SHELL = [line for page in PAGES for language, text in blocks(page) if language == "sh" for line in text.splitlines()]


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NestedBazel]:
    folder = tmp_path_factory.mktemp("readme")
    root = folder / "user"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    # Debian's package of Bazel 4 logs its sandbox unless it is told not to.
    (root / ".bazelrc").write_text("build --nosandbox_debug\n")
    bazel = NestedBazel(folder, root)
    try:
        yield bazel
    finally:
        bazel.run("shutdown")


def test_the_example_names_its_files() -> None:
    assert sorted(FILES) == [
        "MODULE.bazel",
        "WORKSPACE",
        "models/BUILD",
        "models/classifier.py",
        "models/models.toml",
        "models/scale.py",
        "requirements.in",
        "serve.py",
        "stages.py",
    ]


def test_the_example_builds_and_runs(user: NestedBazel) -> None:
    printed = {}
    for line in SHELL:
        program, command, *arguments = shlex.split(line)
        assert program == "bazel"
        done = user.run(command, *arguments)
        assert done.returncode == 0, done.stderr
        printed[command] = done.stdout
    assert "requirements.lock: " in printed["run"]
    assert "\nflax==" in (user.root / "requirements.lock").read_text()
    assert sorted(printed["query"].split()) == [
        "//models:models",
        "//models:models.explain",
        "//models:models.image",
        "//models:models.latency",
        "//models:models.predict",
        "//models:models.predict.cpu-avx2.batch1",
        "//models:models.predict.cpu-avx2.batch32",
        "//models:models.provenance",
        "//models:models.push",
        "//models:models.report",
        "//models:models.reproducibility_test",
        "//models:models.scale",
        "//models:models.scale.cpu-avx2.batch1",
        "//models:models.scale.cpu-avx2.batch32",
        "//models:models.sign",
        "//models:models.update_baseline",
    ]
    path = [str(COMPILER), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    for script, printed in (("serve.py", "(32, 3) float32\n"), ("stages.py", "[2. 2. 2.] 3.0\n")):
        served = subprocess.run(
            [sys.executable, "-B", "-s", script],
            cwd=user.root,
            env={"PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
        )
        assert (served.stdout, served.stderr) == (printed, "")


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


def test_init_in_an_empty_folder(emptied: NestedBazel) -> None:
    """From stagec's checkout: an empty folder has no @stagec."""
    root = emptied.root
    (root / "models" / "net.py").write_text(MODEL)
    words = ["//:init", "--", f"--workspace={root}", "models/net.py:predict"]
    done = emptied.run("run", *words, cwd=root.with_name("stagec"))
    assert done.returncode == 0, done.stderr
    assert "written   models/models.toml\nwritten   models/BUILD\nwritten   " in done.stdout
    assert 'path = "../stagec"' in "".join((root / name).read_text() for name in ENTRY if (root / name).exists())
    assert (root / ".bazelrc").read_text() == SETTINGS  # which Bazel takes
    built = emptied.run(*next_command(done.stdout))
    assert built.returncode == 0, built.stderr
    text = checked("inspect", root / "bazel-bin" / "models" / "models.aot")
    assert (
        "  predict(params, images, /) -> f32[2,3]\n    params.kernel  f32[4,3]\n    images         f32[2,4]\n" in text
    )


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
