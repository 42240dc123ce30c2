"""`bazel run @stagec//:lock`, without Bazel: uv asks the indexes that pip is set to, for real packages."""

import hashlib
import importlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.building import COMPILER, INSTALLER

SETS = [("3.12", COMPILER / "newest"), ("3.11", COMPILER)]
OWN = next(folder for python, folder in SETS if sys.version_info >= (3, int(python[2:]))) / "requirements.lock"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What uv keeps, for the tests of this file."""
    return tmp_path_factory.mktemp("cache")


class Locking:
    """A folder with a requirements.in, and the program."""

    def __init__(self, folder: Path, uv: Path, cache: Path) -> None:
        self.folder, self.uv, self.cache = folder, uv, cache
        self.no_problem = folder / "problem.txt"
        self.no_problem.touch()
        self.lock = folder / "requirements.lock"

    def run(self, requirements: str | None, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the program in the folder, on a file with these lines."""
        if requirements is not None:
            (self.folder / "requirements.in").write_text(requirements)
        own = ["--uv", str(self.uv), "--without-uv", str(self.no_problem)]
        for python, packages in SETS:
            own += ["--own", python, *(str(packages / f"requirements.{end}") for end in ("in", "lock"))]
        return subprocess.run(
            [sys.executable, "-B", str(INSTALLER.with_name("lock.py")), *own, "requirements.in", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(INSTALLER.parent), "UV_CACHE_DIR": str(self.cache), **env},
            capture_output=True,
            text=True,
        )

    def locked(self, requirements: str, *arguments: str, **env: str) -> str:
        """Write a lock; return what is printed."""
        done = self.run(requirements, *arguments, **env)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def refusal(self, requirements: str | None, *arguments: str, **env: str) -> str:
        """What is printed where there is no lock."""
        before = self.lock.exists() and self.lock.read_text()
        done = self.run(requirements, *arguments, **env)
        assert (done.returncode, done.stdout) == (1, "")
        assert (self.lock.exists() and self.lock.read_text()) == before
        left = {path.name for path in self.folder.iterdir()}
        assert left <= {"problem.txt", "requirements.in", "requirements.lock", "wheels"}
        return done.stderr


@pytest.fixture
def locking(tmp_path: Path, uv_program: Path, cache: Path) -> Locking:
    return Locking(tmp_path, uv_program, cache)


def versions(lock: Path) -> dict[str, str]:
    """The packages of a lock with their versions."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock.read_text(), re.MULTILINE))


def test_a_lock_has_stagecs_packages_as_stagec_has_them_and_the_users(locking: Locking) -> None:
    said = locking.locked("# What models/ imports.\nequinox\n")
    found = versions(locking.lock)
    assert {**found, **versions(OWN)} == found
    assert "equinox" in found
    assert said.startswith(f"requirements.lock: {len(found)} packages, all with wheels for this Python\n")
    text = locking.lock.read_text()
    assert text.startswith("# `bazel run @stagec//:lock -- requirements.in` wrote this")
    pins = text.replace("\\\n", " ").splitlines()[1:]
    assert [pin for pin in pins if "--hash=sha256:" not in pin] == []
    assert [pin for pin in pins if pin.startswith("-")] == []


def test_a_lock_without_jax(locking: Locking) -> None:
    locking.locked("zipp\n", "--without-jax")
    found = versions(locking.lock)
    own = versions(OWN)
    assert {"flatbuffers", "jaxlib", "ml-dtypes", "numpy", "pydantic", "zipp"} < found.keys()
    assert "jax" not in found
    assert {**own, **found} == {**own, "zipp": found["zipp"]}
    said = locking.refusal("equinox\n", "--without-jax")
    assert said == "requirements.in: one of these packages needs jax: leave it out, or --without-jax\n"


def test_all_packages_without_a_wheel_are_named_together_before_anything_is_downloaded(
    locking: Locking, tmp_path: Path
) -> None:
    locking.cache = tmp_path / "wheels"
    assert locking.refusal("docopt==0.6.1\nhydra-core==1.3.2\nflax\n") == (
        f"requirements.in: no wheel for Python 3.{sys.version_info.minor}, and stagec installs nothing else:\n"
        "  antlr4-python3-runtime: a source distribution alone "
        "(hydra-core==1.3.2 wants antlr4-python3-runtime==4.9.*)\n"
        "  docopt: a source distribution alone\n"
        "  write other versions or packages, or make wheels (pip wheel --no-deps NAME) and name their folder\n"
        "  in pip's setting find-links\n"
    )
    assert [
        path for path in locking.cache.rglob("*") if path.name in ("jax", "jaxlib", "flax") and "archive" in str(path)
    ] == []


def test_packages_for_another_jaxlib(locking: Locking) -> None:
    said = locking.refusal("scico==0.0.6\n")
    assert said.startswith(
        "requirements.in: your packages want another jaxlib than 0.10.2, with which stagec is tested:\n"
    )
    assert "  Because scico==0.0.6 depends on jax>=0.4.13,<=0.4.35 and you require scico==0.0.6," in said
    # That JAX has no wheel for newer Pythons. Others have none at all: they are named too.
    other = ", or the JAX that they want: jax==0.4.35 and jaxlib==0.4.35" if sys.version_info < (3, 13) else ""
    assert f"  stagec is tested with jax==0.10.2, and locks it\n  write other versions of them{other}\n" in said
    assert (
        f"requirements.in: no wheel for Python 3.{sys.version_info.minor}, and stagec installs nothing else:\n" in said
    )


def test_a_jaxlib_that_the_user_names(locking: Locking) -> None:
    said = locking.locked("jax==0.10.0\njaxlib==0.10.0\n")
    assert {name: versions(locking.lock)[name] for name in ("jax", "jaxlib")} == {"jax": "0.10.0", "jaxlib": "0.10.0"}
    assert (
        "  note: stagec is tested with jaxlib 0.10.2, and this has 0.10.0: for TPUs and GPUs, write tpu_lock, "
        "cuda_lock and rocm_lock (docs/accelerators.md)\n"
    ) in said


def test_a_version_that_does_not_fit_stagecs(locking: Locking) -> None:
    numpy = versions(OWN)["numpy"]
    assert locking.refusal("numpy<2\n") == (
        f"requirements.in: Because you require numpy<2 and numpy=={numpy}, we can conclude that your requirements are "
        f"unsatisfiable.\n  stagec is tested with numpy=={numpy}, and locks it\n"
    )


@pytest.mark.parametrize(
    ("python", "requirements", "kept", "chosen"),
    [
        ("3.11", "zipp\n", None, "3.11"),
        ("3.12", "zipp\n", None, "3.12"),
        ("3.14", "jax\njaxlib\n", None, "3.12"),
        # The versions of a lock stay.
        ("3.14", "zipp\n", "3.11", "3.11"),
        ("3.14", "zipp\n", "3.12", "3.12"),
        ("3.11", "zipp\n", "3.12", "3.11"),
        ("3.14", "jaxlib=={3.12}\n", "3.11", "3.12"),
        ("3.14", "jaxlib=={3.11}\n", "3.12", "3.11"),
        ("3.14", "jaxlib==0.11.1\n", None, "3.12"),
        ("3.14", "jax=={3.11}\n", "3.12", "3.11"),
        ("3.14", "jax=={3.11}\njaxlib\n", None, "3.11"),
    ],
)
def test_the_python_decides_with_which_packages_of_stagecs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, python: str, requirements: str, kept: str | None, chosen: str
) -> None:
    monkeypatch.syspath_prepend(INSTALLER.parent)
    lock = importlib.import_module("lock")
    file = tmp_path / "requirements.in"
    sets = [(oldest, str(folder / "requirements.in"), str(folder / "requirements.lock")) for oldest, folder in SETS]
    pins = {oldest: Path(pins) for oldest, _, pins in sets}
    for oldest, own in pins.items():
        requirements = requirements.replace(f"{{{oldest}}}", versions(own)["jaxlib"])
    file.write_text(requirements)
    sources = lock.tested_with(sets, python, file, pins[kept] if kept else None)
    assert (sources.requirements, sources.pins) == (file, pins[chosen])


def test_versions_stay_until_they_are_upgraded(locking: Locking) -> None:
    locking.locked("typing-extensions\nzipp==3.20.0\n")
    locking.locked("typing-extensions\nzipp\n")
    assert versions(locking.lock)["zipp"] == "3.20.0"
    locking.locked("typing-extensions\nzipp\n", "--upgrade")
    assert versions(locking.lock)["zipp"] != "3.20.0"


def write_wheel(folder: Path, version: str, jaxlib: str, tag: str = "py3-none-any") -> None:
    """Write a wheel of a package that nobody else has, for one jaxlib."""
    name = f"stagec_of_a_test-{version}"
    with zipfile.ZipFile(folder / f"{name}-{tag}.whl", "w") as wheel:
        metadata = (
            f"Metadata-Version: 2.1\nName: stagec-of-a-test\nVersion: {version}\nRequires-Dist: jaxlib=={jaxlib}\n"
        )
        wheel.writestr(f"{name}.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


def test_an_older_version_for_stagecs_jaxlib_is_said(locking: Locking, wheels: Path) -> None:
    write_wheel(wheels, "1.0", "0.10.2")
    write_wheel(wheels, "2.0", "0.10.0")
    said = locking.locked("stagec-of-a-test\n", PIP_FIND_LINKS=str(wheels))
    assert versions(locking.lock)["stagec-of-a-test"] == "1.0"
    assert "  note: stagec-of-a-test is 1.0; alone it would be 2.0, which is for jaxlib 0.10.0\n" in said


def test_a_package_without_a_wheel_for_another_python_is_said(locking: Locking, wheels: Path) -> None:
    here = sys.version_info.minor
    write_wheel(wheels, "1.0", "0.10.2", f"cp3{here}-cp3{here}-manylinux_2_17_x86_64")
    said = locking.locked("stagec-of-a-test\n", PIP_FIND_LINKS=str(wheels))
    if here == 11:
        assert re.search(r"  note: no wheel for Python 3\.14 on Linux x86-64: .*stagec-of-a-test", said)
    else:
        assert f"  note: the lock is for Python 3.{here} and newer\n" in said


def test_the_wheels_of_all_indexes_are_locked(locking: Locking, tmp_path: Path) -> None:
    """As pip takes them: uv lists those of the first index that has a version, here for one Python."""
    wheels = tmp_path / "wheels"
    digests = {}
    for index, python in (("first", "cp311"), ("second", "cp314"), ("folder", "py3")):
        folder = wheels / index / "stagec-of-a-test"
        folder.mkdir(parents=True)
        tag = "py3-none-any" if python == "py3" else f"{python}-{python}-manylinux_2_17_x86_64"
        write_wheel(folder, "1.0", "0.10.2", tag)
        (wheel,) = folder.iterdir()
        digests[index] = hashlib.sha256(wheel.read_bytes()).hexdigest()
        (folder / "index.html").write_text(f'<a href="{wheel.name}#sha256={digests[index]}">{wheel.name}</a>')
    indexes = " ".join((wheels / index).as_uri() for index in ("first", "second"))
    folder = wheels / "folder" / "stagec-of-a-test"
    said = locking.locked("stagec-of-a-test\n", PIP_EXTRA_INDEX_URL=indexes, PIP_FIND_LINKS=str(folder))
    block = locking.lock.read_text().partition("stagec-of-a-test==1.0")[2].partition("\n\n")[0]
    assert {*re.findall(r"--hash=sha256:(\w+)", block)} >= {*digests.values()}
    assert "stagec-of-a-test" not in said
    again = locking.lock.read_text()
    locking.locked("stagec-of-a-test\n", PIP_EXTRA_INDEX_URL=indexes, PIP_FIND_LINKS=str(folder))
    assert locking.lock.read_text() == again


def test_a_wheel_for_another_python_alone(locking: Locking, wheels: Path) -> None:
    write_wheel(wheels, "1.0", "0.10.2", "cp39-cp39-manylinux_2_17_x86_64")
    said = locking.refusal("stagec-of-a-test\n", PIP_FIND_LINKS=str(wheels))
    assert re.search(r"\n  stagec-of-a-test: 1\.0 has wheels for the Python ABI tag: cp39\n", said)


@pytest.mark.parametrize(
    ("requirements", "arguments", "problem"),
    [
        (None, (), "there is no such file: write one that names what your models import, one a line"),
        ("zipp\n", ("--output", "requirements.in"), "the lock would be this file; give it another name with --output"),
        ("zipp\n\n#? aqt: which package?\n", (), "line 3: aqt: which package?\n"),
        ("zipp==\n", (), "Couldn't parse requirement in `requirements.in` at position 0"),
        ("./model\n", (), "Distribution not found at"),
        ("stagec-nobody-has-this\n", (), "Because stagec-nobody-has-this was not found in the package registry"),
    ],
)
def test_what_cannot_be_locked(
    locking: Locking, requirements: str | None, arguments: tuple[str, ...], problem: str
) -> None:
    said = locking.refusal(requirements, *arguments)
    assert said.startswith(f"requirements.in: {problem}")
    assert said.count("requirements.in: ") == 1
    assert "Traceback" not in said


def test_a_machine_without_uv(locking: Locking) -> None:
    locking.no_problem.write_text("compiler/installer.lock: no wheel\n")
    assert locking.refusal("zipp\n") == (
        "requirements.in: locks are made by uv, and this machine has none: compiler/installer.lock: no wheel\n"
    )


def test_a_setting_of_pips_that_uv_does_not_know(locking: Locking) -> None:
    said = locking.refusal("zipp\n", PIP_IGNORE_REQUIRES_PYTHON="1")
    assert said == "requirements.in: uv has no word for pip's setting ignore-requires-python\n"
