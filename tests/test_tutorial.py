"""docs/tutorial.md from its first line to its last: files are written, and commands run, in the order of the page.

The lines are as a reader types them, with three differences. `python3` is the Python of the tests. A container is a
folder with a virtual environment, in which the steps of the Containerfile are taken. The registry is one on this
machine; where none is installed, nothing is pushed.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pip
import pytest

from tests.building import ROOT
from tests.nested import NestedBazel
from tests.registries import Registry, needs_registry

BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```$", (ROOT / "docs" / "tutorial.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
)
PACKAGES = os.pathsep.join(entry for entry in sys.path if entry.endswith("site-packages"))
REGISTRY = "registry.example.com"
EXPECTED = {"docker run": r"\d\n", "bazel run @stagec//:lock": "requirements.lock: "}
"""What a command prints, by its start, as a pattern."""


class Reader:
    """Somebody who follows the page, in a folder beside stagec's clone."""

    def __init__(self, folder: Path, registry: Registry | None) -> None:
        self.root = self.here = folder / "mine"
        self.root.mkdir()
        self.bazel, self.registry = NestedBazel(folder, self.root), registry
        self.container = folder / "container"

    def write(self, text: str) -> None:
        """Write a file of the page, whose path is in its first line."""
        path = self.root / text.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def type(self, line: str) -> None:
        """Run a line; it must succeed."""
        printed = self.run(*self._redirected(line))
        for start, pattern in EXPECTED.items():
            assert not line.startswith(start) or re.search(pattern, printed), f"{line}: {printed}"

    def run(self, words: list[str], given: Path | None, output: Path | None) -> str:
        """Run a command, and return what it prints; given, output: files that it reads and writes."""
        program, *rest = words
        if program == "cd":
            self.here = Path(os.path.normpath(self.here / rest[0]))
            return ""
        if program in ("bazel", "./bazelw"):
            return self._bazel(rest)
        if program == "docker":
            return self._build(rest) if rest[0] == "build" else self._start(given)
        if program == "git":  # the clone is there
            return ""
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(self.root), PACKAGES])}
        if rest[:2] == ["-m", "pip"]:
            rest, env = [str(Path(pip.__file__).parent), *rest[2:]], dict(os.environ, PYTHONPATH="")
        return checked([sys.executable if program == "python3" else program, *rest], self.here, env, output=output)

    def _redirected(self, line: str) -> tuple[list[str], Path | None, Path | None]:
        words = shlex.split(line.replace("${GITHUB_SHA}", "1"))
        sign = words[-2] if len(words) > 1 else ""
        if sign not in ("<", ">"):
            return words, None, None
        path = self.here / words[-1]
        return words[:-2], path if sign == "<" else None, path if sign == ">" else None

    def _bazel(self, words: list[str]) -> str:
        if any(REGISTRY in word for word in words):
            if not self.registry:
                return ""
            words = [word.replace(REGISTRY, self.registry.host) for word in words] + ["--plain-http"]
        done = self.bazel.run(*words, cwd=self.here)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _build(self, words: list[str]) -> str:
        """Take the steps of the Containerfile in a folder; its Python is a virtual environment beside it."""
        containerfile, context = self.here / words[words.index("--file") + 1], self.here / words[-1]
        venv.create(self.container / "python", with_pip=False)
        workdir = self.container
        for line in containerfile.read_text().splitlines()[1:]:
            step, _, rest = line.partition(" ")
            match step:
                case "FROM":
                    assert rest == "docker.io/library/python:3.11-slim"
                case "WORKDIR":
                    workdir = self._inside(rest)
                    workdir.mkdir()
                case "COPY":
                    *sources, target = rest.split()
                    for source in sources:
                        copy(context / source, workdir if target == "./" else self._inside(target))
                case "RUN":
                    program, *arguments = [str(self._inside(w)) if w[0] == "/" else w for w in rest.split()]
                    assert program == "pip"
                    command = [sys.executable, Path(pip.__file__).parent, "--python", self._python(), *arguments]
                    checked(command, workdir, dict(os.environ, PYTHONPATH=""))
                case "CMD":
                    self.command, self.workdir = json.loads(rest), workdir
                case _:
                    raise AssertionError(line)
        return ""

    def _start(self, given: Path | None) -> str:
        program, *arguments = self.command
        assert (program, given is not None) == ("python", True)
        assert given
        return checked([self._python(), *arguments], self.workdir, {}, given)

    def _inside(self, path: str) -> Path:
        return self.container / path.removeprefix("/")

    def _python(self) -> Path:
        return self.container / "python" / "bin" / "python"


def copy(source: Path, target: Path) -> None:
    """Copy as COPY does: the content of a folder, or a file into a folder."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def checked(
    command: list[str | Path], cwd: Path, env: dict[str, str], given: Path | None = None, output: Path | None = None
) -> str:
    """Run a command that must succeed; return its output, or write it into a file."""
    text = given.read_text() if given else ""
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if output:
        output.write_text(done.stdout)
    return done.stdout


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with contextlib.ExitStack() as stack:
        registry = None
        if not needs_registry.args[0]:
            (tmp_path / "registry").mkdir()
            registry = Registry(tmp_path / "registry")
            stack.callback(registry.close)
        reader = Reader(tmp_path, registry)
        stack.callback(reader.bazel.run, "shutdown")
        yield reader


def test_the_tutorial(reader: Reader) -> None:
    typed = 0
    for language, text in BLOCKS:
        lines = text.splitlines()
        if language == "yaml":
            lines = re.findall(r"- run: (.*)", text)
        elif language != "sh":
            reader.write(text)
            continue
        for line in lines:
            reader.type(line)
            typed += 1
    assert typed >= 20
    manifest = (reader.root / "models" / "models.toml").read_text()
    assert "bind = " in manifest
    if reader.registry:
        tags = json.loads(reader.registry.get("models/tags/list"))["tags"]
        assert {"0.1.0", "1"} <= set(tags)
