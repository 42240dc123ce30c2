"""A lock of uv as it is: real uv writes it, for an index made here, and the installer installs it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.building import INSTALLER
from tests.test_python_environment import serving, write_archive

pytestmark = pytest.mark.pinned(but=1)  # all of them, as in test_python_environment.py
PROJECT = """
[project]
name = "user"
version = "1"
requires-python = ">=3.11"
dependencies = ["plain[more]", "layers", "twice==1.0; sys_platform == 'linux'", "twice==2.0; sys_platform != 'linux'"]

[project.optional-dependencies]
drawing = ["drawn"]

[dependency-groups]
models = ["modelled", "elsewhere; sys_platform == 'win32'"]

[tool.uv.workspace]
members = ["layers"]

[tool.uv.sources]
layers = { workspace = true }
"""
MEMBER = """
[project]
name = "layers"
version = "1"
dependencies = ["below"]

[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
"""
PACKAGES = {
    "plain": 'Provides-Extra: more\nRequires-Dist: extra-of-it; extra == "more"\n',
    **dict.fromkeys(("extra-of-it", "drawn", "modelled", "elsewhere", "below", "twice"), ""),
}


def write_index(folder: Path) -> None:
    """Write an index of wheels of PACKAGES, and of version 2.0 of twice."""
    for name, more in PACKAGES.items():
        page = folder / "simple" / name
        page.mkdir(parents=True)
        links = []
        for version in ("1.0", "2.0")[: 1 + (name == "twice")]:
            module = name.replace("-", "_")
            info = f"{module}-{version}.dist-info"
            wheel = folder / f"{module}-{version}-py3-none-any.whl"
            files = {
                f"{module}.py": f"VERSION = '{version}'\n",
                f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}",
                f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            }
            write_archive(wheel, module, files, version)
            digest = subprocess.run(["sha256sum", wheel], check=True, capture_output=True, text=True).stdout.split()[0]
            links.append(f'<a href="/{wheel.name}#sha256={digest}">{wheel.name}</a>')
        (page / "index.html").write_text("<!DOCTYPE html><html><body>" + "".join(links) + "</body></html>")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("index")
    write_index(folder)
    with serving(folder) as port:
        yield f"http://127.0.0.1:{port}/simple"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, index: str, uv_program: Path) -> str:
    """The lock that uv writes for PROJECT."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "layers").mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "layers" / "pyproject.toml").write_text(MEMBER)
    command = [uv_program, "lock", "--no-cache", "--no-config", "--python", sys.executable, "--default-index", index]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    subprocess.run(command, cwd=folder, env=env, check=True)
    return (folder / "uv.lock").read_text()


def install(folder: Path, lock: str, index: str, *words: str | Path) -> tuple[int, str, list[str]]:
    """Install a lock; return the status, what the installer says, and the packages with their versions."""
    (folder / "uv.lock").write_text(lock)
    (folder / "out").mkdir()
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-B", "-E", INSTALLER, folder / "uv.lock", "models/uv.lock", *words]
    done = subprocess.run(command, cwd=folder / "out", env=env, check=False, capture_output=True, text=True)
    packages = folder / "out" / "packages.json"
    listed = json.loads(packages.read_text())["packages"] if packages.exists() else []
    return done.returncode, done.stdout + done.stderr, [f"{one['name']} {one['version']}" for one in listed]


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_what_this_python_needs_of_it_is_installed(
    tmp_path: Path, written: str, index: str, uv_program: Path, installer: str
) -> None:
    words = ("--uv", uv_program) if installer == "uv" else ()
    status, said, packages = install(tmp_path, written, index, *words)
    assert (status, packages) == (0, ["below 1.0", "extra-of-it 1.0", "plain 1.0", "twice 1.0"]), said
    note = (tmp_path / "out" / "note.txt").read_text()
    assert note == "models/uv.lock: what models import of layers belongs into deps: it is not installed\n"


def test_groups_and_extras(tmp_path: Path, written: str, index: str, uv_program: Path) -> None:
    groups = ("--groups=models", "--groups=drawing")
    status, said, packages = install(tmp_path, written, index, "--uv", uv_program, *groups)
    assert status == 0, said
    assert packages == ["below 1.0", "drawn 1.0", "extra-of-it 1.0", "modelled 1.0", "plain 1.0", "twice 1.0"]


HASH = 'requires-python = ">=3.11"'
PLAIN = 'name = "plain"\nversion = "1.0"\nsource = '


@pytest.mark.parametrize(
    ("old", "new", "words", "said"),
    [
        (
            "",
            "",
            ["--groups=tests"],
            'its project has no group or extra "tests": it has drawing, models',
        ),
        ("version = 1\n", "version = 2\n", [], "its format is 2, and this stagec reads 1: upgrade stagec"),
        (
            HASH,
            'requires-python = ">=3.99"',
            [],
            f"it is for Python >=3.99, and this one, {sys.executable}, is {sys.version.split()[0]}\n"
            "  name another: STAGEC_PYTHON=/path/to/python3, or python = of stagec.python where it has one",
        ),
        (
            HASH,
            f"{HASH}\nsupported-markers = [\"sys_platform == 'darwin'\"]",
            [],
            "it is for sys_platform == 'darwin' (tool.uv.environments), and not for this system\n"
            "  add this one there, and run uv lock",
        ),
        (
            "marker = \"sys_platform != 'linux'\"",
            'marker = "nothing of it"',
            [],
            None,
        ),
        (
            HASH,
            f"{HASH}\nconflicts = []",
            [],
            "its project declares groups or extras that conflict, and stagec does not read their markers\n"
            "  export those that you build with: uv export --no-emit-workspace --output-file requirements.lock",
        ),
        (
            PLAIN,
            f'{PLAIN}{{ git = "https://example.com/plain?rev=1#2" }} #',
            [],
            "plain is from git https://example.com/plain?rev=1#2, and stagec installs wheels of an index\n"
            "  put a wheel of it into an index, or its sources into the workspace and into deps",
        ),
        (
            '\nwheels = [\n    { url = "INDEX/plain-',
            '\nbuilt = [\n    { url = "INDEX/plain-',
            [],
            "plain has no wheel with a hash, and stagec builds none\n"
            "  put a wheel of it into an index, and run uv lock",
        ),
        (
            "marker = \"sys_platform != 'linux'\"",
            "marker = \"sys_platform == 'linux'\"",
            [],
            "for this Python it has 1.0 and 2.0 of twice, and an environment has one\n  write it again: uv lock",
        ),
    ],
)
def test_what_cannot_be_installed_is_refused_by_name(
    tmp_path: Path, written: str, index: str, old: str, new: str, words: list[str], said: str | None
) -> None:
    host = index.removesuffix("/simple")
    old, new = old.replace("INDEX", host), new.replace("INDEX", host)
    assert old in written
    status, output, _ = install(tmp_path, written.replace(old, new), index, *words)
    if said is None:  # packaging's words
        assert output.startswith("models/uv.lock: InvalidMarker: "), output
        assert output.endswith("\n  write it again: uv lock\n")
    else:
        assert (status, output) == (2, f"models/uv.lock: {said}\n")
    assert not list((tmp_path / "out").iterdir())


def test_a_lock_without_a_project(tmp_path: Path, index: str) -> None:
    status, output, _ = install(tmp_path, 'version = 1\nrequires-python = ">=3.11"\n', index)
    says = "it has no project, and stagec installs what a project needs\n  write [project] into pyproject.toml"
    assert (status, output) == (2, f"models/uv.lock: {says}, and run uv lock\n")


def test_each_note_stays(tmp_path: Path, written: str, index: str) -> None:
    status, said, _ = install(tmp_path, written, index, "--without-uv", "there is no uv")
    assert status == 0, said
    assert (tmp_path / "out" / "note.txt").read_text().splitlines() == [
        "models/uv.lock: what models import of layers belongs into deps: it is not installed",
        "models/uv.lock: pip installs it, not uv, which takes longer: there is no uv",
    ]
    assert not (tmp_path / "out" / "pins.txt").exists()


def test_a_lock_that_is_not_toml(tmp_path: Path, index: str) -> None:
    status, output, _ = install(tmp_path, "version = ", index)
    assert status == 2
    assert output.startswith("models/uv.lock: Invalid value")
    assert output.endswith("\n  write it again: uv lock\n")
