"""Byte code of stagec's own modules, which python_environment.py writes beside the packages: it is not an input."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.building import COMPILER, INSTALLER, write_specs
from tests.users import WAYS, needs_isolation, where
from tests.worker.bazel import Worker

_ASK = """
import runpy, sys

compiled = []
sys.addaudithook(lambda event, arguments: compiled.append(arguments[1]) if event == "compile" else None)
sys.argv = [sys.argv[1], "stub", "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "stagec"]
    files = {module.__file__ for module in modules}
    sys.stderr.write("\\n".join(sorted(files & set(map(str, compiled)))))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the compiler, and a Python environment without packages that has its byte code."""
    folder = tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(COMPILER / "stagec", folder / "compiler" / "stagec", ignore=ignored)
    (folder / "environment").mkdir()
    (folder / "empty.lock").touch()
    words = [sys.executable, "-B", "-E", INSTALLER, folder / "empty.lock", "empty.lock"]
    words += ["--stagec", folder / "compiler" / "stagec"]
    subprocess.run(words, cwd=folder / "environment", check=True, capture_output=True)
    return folder


@pytest.fixture
def compiled(installed: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Start stagec as an action does, from a copy of the folder; return which of its modules Python compiled."""
    shutil.copytree(installed, tmp_path, dirs_exist_ok=True)
    (tmp_path / "external").mkdir()
    # As in a sandbox, where a link leads to the packages, and nothing of their repository is there besides.
    (tmp_path / "external" / "site-packages").symlink_to(tmp_path / "environment" / "site-packages")

    def start(**variables: str | None) -> list[str]:
        main = "compiler/stagec/__main__.py"
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": "external/site-packages:compiler",
            "PYTHONSAFEPATH": "1",
            "STAGEC_PYTHON_ABI": "",  # that of this interpreter
        }
        done = subprocess.run(
            [sys.executable, "-B", "-s", "-S", "-c", _ASK, main],
            cwd=tmp_path,
            env={name: value for name, value in {**environment, **variables}.items() if value is not None},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.startswith("usage: stagec stub")
        files = [Path(file).relative_to(tmp_path / "compiler" / "stagec") for file in done.stderr.split()]
        return [str(file) for file in files]

    return start


FIRST = [
    "__init__.py",
    *(f"core/{name}.py" for name in ("__init__", "builds/__init__", "builds/version", "faces")),
    *(f"worker/{name}.py" for name in ("__init__", "installed")),
]
"""What has been imported when byte code is looked for."""


def test_a_module_is_compiled_only_if_it_was_edited(compiled: Callable[..., list[str]], tmp_path: Path) -> None:
    assert compiled() == FIRST
    edited = tmp_path / "compiler" / "stagec" / "cli" / "stub.py"
    before = edited.stat()
    edited.write_text(edited.read_text().replace("text", "test", 1))  # as long as it was
    os.utime(edited, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert compiled() == sorted([*FIRST, "cli/stub.py"])


def test_another_python_and_damage_only_take_time(compiled: Callable[..., list[str]], tmp_path: Path) -> None:
    byte_code = tmp_path / "environment" / "byte-code"
    for name, data in {"stagec.cli": b"", "stagec.cli.files": b"\xff" * 99}.items():
        assert (byte_code / f"{name}.pyc").read_bytes()[4:8] == b"\x03\x00\x00\x00", "a hash, which is compared"
        (byte_code / f"{name}.pyc").write_bytes(data)
    (byte_code / "stagec.cli.stub.pyc").unlink()
    assert compiled() == sorted([*FIRST, "cli/__init__.py", "cli/files.py", "cli/stub.py"])
    shutil.rmtree(byte_code)
    assert len(compiled()) > 10


def test_byte_code_beside_any_other_folder_is_not_taken(compiled: Callable[..., list[str]], tmp_path: Path) -> None:
    """Somebody else may write there: /tmp/byte-code is beside /tmp/mine."""
    (tmp_path / "environment" / "mine").mkdir()
    assert len(compiled(PYTHONPATH="environment/mine:compiler")) > 10
    assert len(compiled(STAGEC_PYTHON_ABI=None)) > 10, "the rules did not start it"


def test_a_module_that_does_not_compile_has_none(tmp_path: Path) -> None:
    shutil.copytree(COMPILER / "stagec", tmp_path / "stagec")
    (tmp_path / "stagec" / "broken.py").write_text("def f(:\n")
    (tmp_path / "stagec" / "whole.py").write_text("def f(): ...\n")
    (tmp_path / "empty.lock").touch()
    words = [
        sys.executable,
        "-B",
        "-E",
        INSTALLER,
        tmp_path / "empty.lock",
        "empty.lock",
        "--stagec",
        tmp_path / "stagec",
    ]
    (tmp_path / "environment").mkdir()
    done = subprocess.run(words, cwd=tmp_path / "environment", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    compiled = {path.name for path in (tmp_path / "environment" / "byte-code").iterdir()}
    assert "stagec.whole.pyc" in compiled
    assert "stagec.broken.pyc" not in compiled


_MODEL = """
import sys

compiled = []
sys.addaudithook(lambda event, arguments: compiled.append(str(arguments[1])) if event == "compile" else None)
assert "stagec.cli.stub" not in sys.modules
import stagec.cli.stub


def f(x):
    assert not [file for file in compiled if file.endswith("stagec/cli/stub.py")]
    return x
"""


@pytest.mark.parametrize("way", [*WAYS])
def test_an_action_of_a_worker_sees_it(installed: Path, tmp_path: Path, way: str) -> None:
    needs_isolation(way=way)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "f.py").write_text(_MODEL)
    (tmp_path / "models" / "m.toml").write_text(
        '[manifest]\nname = "m"\nversion = "1"\n'
        '[functions.f]\nentry = "models.f:f"\nargs = ["f32[4]"]\nplatforms = ["cpu"]\n'
    )
    write_specs("models/m.toml", tmp_path, tmp_path)
    words = ["--output", "m.f.exported", "--description", "m.f.json", "--unread", "unread", "--declared", "unread"]
    words += ["--source", "models/f.py", "--spec", "m.f.spec", "--import-root", "."]
    with Worker(
        "action export", tmp_path, before=where(way), packages=installed / "environment" / "site-packages"
    ) as worker:
        assert worker.ask(words, ["models/f.py", "m.f.spec"]) == (0, "")
