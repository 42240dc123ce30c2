"""README's example is built and run."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.building import COMPILER, ROOT
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
SHELL = [line for language, text in blocks("README.md") if language == "sh" for line in text.splitlines()]


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
        "serve.py",
        "stages.py",
    ]


def test_the_example_builds_and_runs(user: NestedBazel) -> None:
    for line in SHELL:
        program, command, *arguments = shlex.split(line)
        assert program == "bazel"
        done = user.run(command, *arguments)
        assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == [
        "//models:models",
        "//models:models.explain",
        "//models:models.predict",
        "//models:models.predict.cpu-avx2.batch1",
        "//models:models.predict.cpu-avx2.batch32",
        "//models:models.provenance",
        "//models:models.reproducibility_test",
        "//models:models.scale",
        "//models:models.scale.cpu-avx2.batch1",
        "//models:models.scale.cpu-avx2.batch32",
        "//models:models.sign",
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
