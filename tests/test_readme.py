"""README's example is built and run, and each of its commands is one that something runs."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.building import COMPILER, ROOT
from tests.nested import NestedBazel

README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FILES = {match[1]: text for _, text in BLOCKS if (match := re.match(r"# (\S+)\n", text))}
SHELL = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
INDENTED = [line.strip() for line in README.splitlines() if re.match(r"    (\./|tools/|python3|\.venv/)", line)]


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
        "//models:models.provenance",
        "//models:models.reproducibility_test",
        "//models:models.scale",
        "//models:models.scale.cpu.batch1",
        "//models:models.scale.cpu.batch32",
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
    (shown,) = (text for _, text in BLOCKS if "missing" in text)
    manifest = user.root / "models" / "models.toml"
    good = manifest.read_text()
    manifest.write_text(good.replace('"f32[batch,3]"', '"f32[batch,3"'))
    try:
        said = user.run("build", "//models").stderr
    finally:
        manifest.write_text(good)
    assert shown in said


def test_every_other_command_is_run_by_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert len(INDENTED) >= 6
    assert [command for command in INDENTED if command not in script.splitlines()] == []
