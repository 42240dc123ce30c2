"""Installing a locked environment: real pip runs, on a wheel made here."""

import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

INSTALLER = Path(__file__).parent.parent / "rules" / "private" / "python_environment.py"
PYTHON_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def write_wheel(folder: Path, tag: str = "py3-none-any") -> str:
    """Write the wheel of a package `tiny` 1.0; return its sha256."""
    path = folder / f"tiny-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny.py", "ANSWER = 42\n")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install(folder: Path, lock: str, python: str = sys.executable, **env: str) -> subprocess.CompletedProcess[str]:
    """Install `lock` into `folder`/out with wheels from `folder`."""
    (folder / "requirements.lock").write_text(lock)
    (folder / "out").mkdir()
    return subprocess.run(
        [python, "-E", "-P", str(INSTALLER), str(folder / "requirements.lock"), "models/requirements.lock"],
        cwd=folder / "out",
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "PIP_FIND_LINKS": str(folder), **NO_INDEX, **env},
        capture_output=True,
        text=True,
    )


def refusal(folder: Path, lock: str, python: str = sys.executable, **env: str) -> str:
    """The message with which `install` refuses; nothing is left behind."""
    result = install(folder, lock, python, **env)
    assert result.returncode == 2, result.stdout + result.stderr
    assert list((folder / "out").iterdir()) == []
    return result.stdout.strip()


def test_packages_are_installed_compiled_and_fingerprinted(tmp_path: Path) -> None:
    lock = f"# A comment.\ntiny==1.0 \\\n    --hash=sha256:{write_wheel(tmp_path)}\n"
    result = install(tmp_path, lock)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    site_packages = tmp_path / "out" / "site-packages"
    assert (site_packages / "tiny.py").read_text() == "ANSWER = 42\n"
    compiled = next((site_packages / "__pycache__").glob("tiny.*.pyc")).read_bytes()
    assert compiled[4:8] == b"\x01\x00\x00\x00", "a hash, not a clock, and never checked"
    assert str(tmp_path).encode() not in compiled
    assert len((tmp_path / "out" / "fingerprint.txt").read_text()) == 65
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.fixture(scope="module")
def debian12(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the pip of Debian 12, whose report says less than a newer one's."""
    if sys.version_info >= (3, 12):
        pytest.skip("pip 23.0.1 needs pkgutil.ImpImporter, which Python 3.12 removed")
    folder = tmp_path_factory.mktemp("debian12")
    venv = [sys.executable, "-m", "venv", "--without-pip", folder]
    subprocess.run(venv, check=True)
    # The installer takes what `-m pip` is, so pip goes where that Python looks for it.
    target = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, "pip==23.0.1"]
    subprocess.run(pip, check=True)
    return str(folder / "bin" / "python")


@pytest.mark.parametrize("pip", ["this", "23.0.1"])
def test_the_wheels_that_were_installed_are_listed(tmp_path: Path, pip: str, request: pytest.FixtureRequest) -> None:
    python = sys.executable if pip == "this" else request.getfixturevalue("debian12")
    digest = write_wheel(tmp_path)
    lock = f"tiny==1.0 --hash=sha256:{'0' * 64} --hash=sha256:{digest}\n"
    result = install(tmp_path, lock, python)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((tmp_path / "out" / "packages.json").read_text()) == {
        "python": platform.python_version(),
        "packages": [{"name": "tiny", "version": "1.0", "filename": "tiny-1.0-py3-none-any.whl", "sha256": digest}],
    }


def test_an_empty_lock_is_an_empty_environment(tmp_path: Path) -> None:
    assert install(tmp_path, "# nothing\n").returncode == 0
    assert list((tmp_path / "out" / "site-packages").iterdir()) == []
    assert json.loads((tmp_path / "out" / "packages.json").read_text())["packages"] == []


def test_settings_of_pip_do_not_send_the_packages_elsewhere(tmp_path: Path) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    result = install(tmp_path, lock, PIP_USER="1", PIP_TARGET=str(tmp_path / "a"), PIP_PREFIX=str(tmp_path / "b"))
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "out" / "site-packages" / "tiny.py").exists()


def test_a_wrong_hash_names_the_package_and_both_hashes(tmp_path: Path) -> None:
    got = write_wheel(tmp_path)
    assert refusal(tmp_path, f"tiny==1.0 --hash=sha256:{'0' * 64}\n") == (
        "models/requirements.lock: tiny: the downloaded file does not have the locked sha256\n"
        f"  expected {'0' * 64}\n"
        f"  got      {got}\n"
        "  regenerate the lock if you meant to change this package; if not, do not trust the file you were sent"
    )


def test_several_wrong_hashes_are_counted(tmp_path: Path) -> None:
    got = write_wheel(tmp_path)
    message = refusal(tmp_path, "tiny==1.0 " + " ".join(f"--hash=sha256:{digit * 64}" for digit in "012") + "\n")
    assert "expected one of 3 hashes" in message
    assert f"got      {got}" in message


def test_all_that_a_lock_leaves_open_is_named(tmp_path: Path) -> None:
    digest = write_wheel(tmp_path)
    assert refusal(tmp_path, f"-r more.txt\nb==1.0\ntiny>=1 ; python_version == '3.11' --hash=sha256:{digest}\n") == (
        "models/requirements.lock: -r is not for lock files\n"
        "  write every package in this one\n"
        "models/requirements.lock: b==1.0 has no hash\n"
        "  generate the lock with hashes (uv pip compile --generate-hashes)\n"
        "models/requirements.lock: tiny>=1 has no pinned version\n"
        "  pin it with == and give its hashes"
    )


def test_no_wheel_for_this_python_says_for_which(tmp_path: Path) -> None:
    digest = write_wheel(tmp_path, "cp27-cp27m-win32")
    message = refusal(tmp_path, f"tiny==1.0 --hash=sha256:{digest}\n")
    assert message.startswith("models/requirements.lock: tiny==1.0: no wheel for CPython 3.")
    assert message.endswith("  lock a version that has one, or name another interpreter in STAGEC_PYTHON")


def test_an_index_that_cannot_be_reached(tmp_path: Path) -> None:
    lock = f"tiny==1.0 --hash=sha256:{'0' * 64}\n"
    env = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_FIND_LINKS": ""}
    assert refusal(tmp_path, lock, **env) == (
        "models/requirements.lock: the package index cannot be reached (it needs tiny==1.0 first): "
        "NewConnectionError\n"
        "  check the network and pip's index settings (pip config list), then build again"
    )


def test_an_index_that_gives_another_digest(tmp_path: Path) -> None:
    digest = write_wheel(tmp_path)
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    link = f"{wheel.as_uri()}#md5={hashlib.md5(wheel.read_bytes()).hexdigest()}"
    (tmp_path / "simple" / "tiny").mkdir(parents=True)
    (tmp_path / "simple" / "tiny" / "index.html").write_text(f'<!DOCTYPE html><a href="{link}">{wheel.name}</a>')
    env = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": (tmp_path / "simple").as_uri(), "PIP_FIND_LINKS": ""}
    assert refusal(tmp_path, f"tiny==1.0 --hash=sha256:{digest}\n", **env) == (
        "models/requirements.lock: tiny: pip does not say the sha256 of its wheel, only another digest of the index\n"
        "  use an index whose links have #sha256=, or a folder of wheels (PIP_FIND_LINKS)"
    )


def test_an_interpreter_without_pip(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    message = refusal(tmp_path, f"tiny==1.0 --hash=sha256:{'0' * 64}\n", str(tmp_path / "bare" / "bin" / "python"))
    assert "has no pip\n  install it (Debian: apt-get install python3-pip)" in message


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("python_environment", INSTALLER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_what_is_pinned_counts_in_the_fingerprint(installer: ModuleType) -> None:
    lock = "# made today\nb==2 \\\n  --hash=sha256:bb \\\n  --hash=sha256:aa\na==1 ; os_name == 'nt' --hash=sha256:cc\n"
    same = "a==1  ;  os_name == 'nt' --hash=sha256:cc  # needed by b\nb==2 --hash=sha256:aa --hash=sha256:bb\n"
    assert installer.normalized_pins(lock) == installer.normalized_pins(same)
    assert installer.fingerprint(lock) == installer.fingerprint(same)
    assert installer.fingerprint(lock) != installer.fingerprint(lock.replace("b==2", "b==3"))
    assert installer.fingerprint(lock) != installer.fingerprint(lock.replace("cc", "dd"))
