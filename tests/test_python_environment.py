"""Installing a locked environment: real uv and pip run, on wheels made here."""

import base64
import hashlib
import importlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import ssl
import stat
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from types import ModuleType

import pip
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stagec.building import examination
from stagec.core.builds.platforms import PLATFORMS
from tests.building import COMPILER, INSTALLER, ROOT
from tests.users import as_user

pytestmark = pytest.mark.pinned(but=1)  # all of them: only the suite other_versions has them
PYTHON_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def write_wheel(folder: Path, tag: str = "py3-none-any", answer: int = 42) -> str:
    """Write the wheel of a package `Tiny` 1.0, which has all that wheels have; return its sha256."""
    path = folder / f"tiny-1.0-{tag}.whl"
    files = {
        "tiny.py": f"ANSWER = {answer}\n",
        "tiny.pyi": "ANSWER: int\n",
        "tiny_tools/__init__.py": "",
        "tiny_tools/include/tiny.h": "int answer;\n",
        "tiny_tools/tests/test_tiny.py": "import tiny\n",
        "tiny_tools/broken.py": "this is not Python\n",
        "tiny-1.0.data/scripts/tiny": "#!python\nimport tiny\n",
        "tiny-1.0.data/scripts/tiny-program": "\x7fELF\n",
        "tiny-1.0.data/data/share/tiny.txt": "data\n",
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: Tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
        "tiny-1.0.dist-info/entry_points.txt": "[console_scripts]\ntiny-answer = tiny:ANSWER\n",
    }
    write_archive(path, "tiny", files)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_archive(path: Path, name: str, files: dict[str, str], version: str = "1.0") -> None:
    """Write a wheel: files, and a RECORD of them."""
    record = [f"{file},sha256={_digest(text)},{len(text)}\n" for file, text in files.items()]
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, f"{name}-{version}.dist-info/RECORD": "".join(record)}.items():
            info = zipfile.ZipInfo(file)
            info.external_attr = (0o775 if "/scripts/" in file else 0o664) << 16
            wheel.writestr(info, text)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


# The words that give the installer a uv.
Uv = list[str]


@pytest.fixture(scope="session")
def uv(uv_program: Path) -> Uv:
    return ["--uv", str(uv_program)]


@pytest.fixture(params=["uv", "pip"])
def words(request: pytest.FixtureRequest) -> Uv:
    """Tests that ask for it run twice: uv installs, and pip does."""
    return request.getfixturevalue("uv") if request.param == "uv" else []


def install(
    folder: Path,
    lock: str,
    python: str = sys.executable,
    words: Uv | None = None,
    before: Sequence[str] = (),
    user: int | None = None,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Install `lock` into `folder`/out with wheels from `folder`. before: a command that runs it. user: who does."""
    (folder / "requirements.lock").write_text(lock)
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    if user is not None:
        os.chown(folder / "out", user, user)
    command = [
        *before,
        python,
        "-B",
        "-E",
        str(INSTALLER),
        str(folder / "requirements.lock"),
        "models/requirements.lock",
    ]
    return subprocess.run(
        [*command, *(words or [])],
        cwd=folder / "out",
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "PIP_FIND_LINKS": str(folder), **NO_INDEX, **env},
        user=user,
        group=user,
        extra_groups=None if user is None else (),
        capture_output=True,
        text=True,
    )


def refusal(
    folder: Path, lock: str, python: str = sys.executable, status: int = 2, words: Uv | None = None, **env: str
) -> str:
    """The message with which `install` refuses; nothing is left behind."""
    result = install(folder, lock, python, words, **env)
    assert result.returncode == status, result.stdout + result.stderr
    assert list((folder / "out").iterdir()) == []
    steps = ("installing models/requirements.lock with pip", "installing 1 package of models/requirements.lock")
    return "\n".join(line for line in result.stdout.splitlines() if line not in steps)


def give_pip(python: Path) -> None:
    """Let an interpreter below a folder of a test find the pip of the tests."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = python.parents[1] / "lib" / version / "site-packages"
    shutil.copytree(Path(pip.__file__).parent, packages / "pip", dirs_exist_ok=True)


def installed_by(folder: Path, lock: str, words: Uv, **env: str) -> tuple[str, str]:
    """Install; return the program that installed, and the note for the user."""
    result = install(folder, lock, words=words, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    note = (folder / "out" / "note.txt").read_text()
    return "pip" if " with pip\n" in result.stdout or ": pip installs it, " in note else "uv", note


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All that is below a folder, by path: modes and, of files, bytes. Without the note for the user."""
    found = {path for path in folder.rglob("*") if path.name != "note.txt"}
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, b"" if path.is_dir() else path.read_bytes())
        for path in found
    }


def test_packages_for_another_architecture(tmp_path: Path, words: Uv) -> None:
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    digests = {
        tag: write_wheel(tmp_path, f"{PYTHON_TAG}-{PYTHON_TAG}-{tag}", answer)
        for answer, tag in enumerate(
            [f"manylinux_2_{minor}_{machine}" for minor in (17, 27, 34) for machine in (platform.machine(), other)]
        )
    }
    lock = " ".join(["tiny==1.0", *(f"--hash=sha256:{digest}" for digest in digests.values())]) + "\n"
    fingerprints = set()
    for arguments in ([], ["--architecture", other]):
        result = install(tmp_path, lock, words=[*words, *arguments])
        assert (result.returncode, result.stderr) == (0, ""), result.stdout
        assert (tmp_path / "out" / "note.txt").read_text() == ""
        fingerprints.add((tmp_path / "out" / "fingerprint.txt").read_text())
    assert len(fingerprints) == 2
    (package,) = json.loads((tmp_path / "out" / "packages.json").read_text())["packages"]
    assert package["sha256"] == digests[f"manylinux_2_27_{other}"]  # 2.34 is newer than what is asked for


def test_packages_of_debian_are_unpacked_without_dpkg(tmp_path: Path) -> None:
    def package(name: str, files: dict[str, str]) -> Path:
        data = io.BytesIO()
        with tarfile.open(mode="w:xz", fileobj=data) as archive:
            for path, text in files.items():
                info = tarfile.TarInfo(path)
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
        members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data.getvalue()}
        parts = [b"!<arch>\n"]
        for member, content in members.items():
            parts.append(f"{member:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content)
            parts.append(b"\n" * (len(content) % 2))
        (tmp_path / name).write_bytes(b"".join(parts))
        return tmp_path / name

    python = package("python.deb", {"./usr/bin/python3.11": "python", "./usr/share/doc/python": "text"})
    qemu = package("qemu.deb", {"./usr/bin/qemu-aarch64-static": "qemu", "./usr/bin/qemu-arm-static": "other"})
    script = INSTALLER.with_name("debian_packages.py")
    (tmp_path / "out").mkdir()
    subprocess.run([sys.executable, "-B", str(script), str(python), str(qemu)], cwd=tmp_path / "out", check=True)
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {"qemu-aarch64", "root/usr/bin/python3.11"}
    assert os.access(tmp_path / "out" / "qemu-aarch64", os.X_OK)
    (tmp_path / "other.deb").write_bytes(b"PK")
    refused = subprocess.run(
        [sys.executable, "-B", str(script), "../other.deb"], cwd=tmp_path / "out", capture_output=True, text=True
    )
    assert "not a Debian package" in refused.stderr


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
def test_packages_of_debian_come_from_where_apt_takes_them(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "more.sources").write_text(
        "Types: deb\nURIs: https://b.example.com/debian-security/\nSuites: trixie-security\nComponents: main\n"
    )
    (tmp_path / "list").write_text(
        "deb http://a.example.com/pub/debian trixie main\ndeb https://c.example.com/node node main\n"
    )
    settings = f'Dir::Etc::sourcelist "{tmp_path}/list";\nDir::Etc::sourceparts "{tmp_path}/parts";\n'
    (tmp_path / "apt.conf").write_text(settings)
    done = subprocess.run(
        ["bash", INSTALLER.with_name("debian_lock.sh"), "archives"],
        env={"PATH": os.environ["PATH"], "APT_CONFIG": str(tmp_path / "apt.conf")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["http://a.example.com/pub/debian", "https://b.example.com/debian-security"]


def test_packages_are_installed_compiled_and_fingerprinted(tmp_path: Path, words: Uv) -> None:
    lock = f"# A comment.\ntiny==1.0 \\\n    --hash=sha256:{write_wheel(tmp_path)}\n"
    result = install(tmp_path, lock, words=words)
    assert (result.returncode, result.stderr) == (0, "")
    site_packages = tmp_path / "out" / "site-packages"
    assert (site_packages / "tiny.py").read_text() == "ANSWER = 42\n"
    compiled = next((site_packages / "__pycache__").glob("tiny.*.pyc")).read_bytes()
    assert compiled[4:8] == b"\x01\x00\x00\x00", "a hash, not a clock, and never checked"
    assert str(tmp_path).encode() not in compiled
    assert not (site_packages / "tiny_tools" / "tests" / "__pycache__").exists()
    assert len((tmp_path / "out" / "fingerprint.txt").read_text()) == 65
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"fingerprint.txt", "note.txt", "packages.json", "site-packages", "unknown.txt"}
    assert (tmp_path / "out" / "note.txt").read_text() == ""
    assert result.stdout.startswith(
        "installing 1 package of " if words else "installing models/requirements.lock with pip"
    )


def test_a_record_that_names_files_elsewhere_compiles_none_of_them(installer: ModuleType, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site-packages", tmp_path / "elsewhere"
    for file in (site / "tiny.py", site / "tiny-1.0.dist-info" / "METADATA", elsewhere / "a.py", elsewhere / "b.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("Name: tiny\n" if file.name == "METADATA" else "A = 1\n")
    record = f"tiny.py,,\n{elsewhere}/a.py,,\n../elsewhere/b.py,,\n"
    (site / "tiny-1.0.dist-info" / "RECORD").write_text(record)
    for _ in range(2):  # the second takes what the first has kept
        installer.byte_code.compile_all(site, {"tiny": "0" * 64}, tmp_path / "cache")
        assert [path.name.split(".")[0] for path in tmp_path.rglob("*.pyc")] == ["tiny"]
        shutil.rmtree(site / "__pycache__")


def test_steps_one_by_one_say_what_the_next_one_does(tmp_path: Path, words: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    assert install(tmp_path, lock, words=words).returncode == 0
    whole = contents(tmp_path / "out")
    said = [install(tmp_path, lock, words=[*words, "--step", "choose"]).stdout]
    assert not (tmp_path / "out" / "state.json").stat().st_mode & 0o077, "addresses may have passwords"
    command = [
        sys.executable,
        "-B",
        "-E",
        str(INSTALLER),
        str(tmp_path / "requirements.lock"),
        "models/requirements.lock",
    ]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_FIND_LINKS": str(tmp_path), **NO_INDEX}
    for step in ("install", "compile"):
        done = subprocess.run(
            [*command, "--step", step, *words], cwd=tmp_path / "out", env=env, capture_output=True, text=True
        )
        said.append(done.stdout)
    assert said == [
        f"installing {'1 package of models/requirements.lock' if words else 'models/requirements.lock with pip'}\n",
        "compiling the modules of models/requirements.lock\n",
        "models/requirements.lock is installed\n",
    ]
    assert contents(tmp_path / "out") == whole


def test_uv_installs_what_pip_installs(tmp_path: Path, uv: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    trees = []
    for words in (uv, []):
        assert install(tmp_path, lock, words=words).returncode == 0
        trees.append(contents(tmp_path / "out"))
    assert trees[0] == trees[1]
    assert {"site-packages/bin/tiny-program", "site-packages/share/tiny.txt"} <= trees[0].keys()
    assert not {"site-packages/bin/tiny", "site-packages/bin/tiny-answer"} & trees[0].keys()
    assert {oct(mode & 0o777) for mode, _ in trees[0].values()} == {"0o644", "0o755"}


@pytest.mark.parametrize("other", ["a virtual environment", "a link and another umask", "another day"])
def test_an_environment_is_the_same_wherever_it_is_installed(scratch: Path, other: str, words: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(scratch)}\n"
    assert install(scratch, lock, words=words).returncode == 0
    first = contents(scratch / "out")
    python, before, env = str(scratch / "python" / "bin" / "python"), list[str](), dict[str, str]()
    if "link" in other:
        (scratch / "python" / "bin").mkdir(parents=True)
        Path(python).symlink_to(os.path.realpath(sys.executable))
    else:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", scratch / "python"], check=True)
    give_pip(Path(python))
    if "umask" in other:
        before = ["sh", "-c", 'umask 077; exec "$0" "$@"']
    elif other == "another day":
        library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
        if not library:
            pytest.skip("there is no libfaketime (Debian: libfaketime)")
        env = {"LD_PRELOAD": str(library), "FAKETIME": "@2031-02-03 04:05:06"}
    # Nothing comes from the caches of the first.
    result = install(scratch, lock, python, words, before, HOME=str(scratch / "home"), TZ="Asia/Tokyo", **env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert contents(scratch / "out") == first


def test_an_environment_is_the_same_for_another_user(scratch: Path, words: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(scratch)}\n"
    assert install(scratch, lock, words=words).returncode == 0
    first = contents(scratch / "out")
    with as_user("ordinary user") as user:
        scratch.chmod(0o755)
        if not user.can("test", "-r", INSTALLER):
            pytest.skip("this user cannot read the tests' own files")
        if words:
            shutil.copy(words[1], scratch / "uv")
            words = ["--uv", str(scratch / "uv")]
        home = scratch / "home"
        home.mkdir()
        if user.number is not None:
            os.chown(home, user.number, user.number)
        env = {"HOME": str(home)}
        if user.python != sys.executable:
            give_pip(Path(user.python))
            env["LD_LIBRARY_PATH"] = str(Path(user.python).parents[1] / "lib")
        result = install(scratch, lock, user.python, words, user=user.number, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert contents(scratch / "out") == first


# What is left of a package in an environment that is trimmed, and what is not.
KEPT = {
    "pkg/__init__.py": "from pkg.imported.tests import helper\n",
    "pkg/imported/tests/helper.py": "import pkg.chained.tests.more as more\n",
    "pkg/chained/tests/more.py": "",
    "pkg/relative/__init__.py": "from . import tests\n",
    "pkg/relative/tests/__init__.py": "",
    "pkg/relative/module.py": "from .deep.tests.module import (\n    function,\n)\n",
    "pkg/relative/deep/tests/module.py": "def function(): ...\n",
    "pkg/named/__init__.py": "import importlib\n\ndef f():\n    importlib.import_module('.tests', __name__)\n",
    "pkg/named/tests/__init__.py": "",
    "pkg/opened/__init__.py": "import os\nDATA = os.path.join(os.path.dirname(__file__), 'tests', 'data.txt')\n",
    "pkg/opened/tests/data.txt": "data\n",
    "pkg/lazy/__init__.py": "import lazy_loader\nf, g, h = lazy_loader.attach_stub(__name__, __file__)\n",
    "pkg/lazy/__init__.pyi": "from .module import f\n",
    "pkg/testing/__init__.py": "",
    "pkg/unused/__init__.py": '"""Run pkg.unused.tests, or \'tests\'."""\nfor tests in []:  # tests\n    tests.tests\n',
    "pkg/py.typed": "",
}
LEFT_OUT = {
    "pkg/unused/tests/__init__.py": "import pkg.unused.tests.more\n",
    "pkg/unused/tests/data.npz": "",
    "pkg/testing/tests/test_testing.py": "",
    "pkg/__init__.pyi": "",
    "pkg/include/pkg.h": "",
}


@pytest.mark.parametrize("trimmed", [True, False])
def test_what_nothing_imports_is_left_out(tmp_path: Path, trimmed: bool) -> None:
    metadata = {"METADATA": "Name: pkg\nVersion: 1.0\n", "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"}
    metadata["WHEEL"] += "Tag: py3-none-any\n"
    wheel = tmp_path / "pkg-1.0-py3-none-any.whl"
    files = {f"pkg-1.0.dist-info/{name}": text for name, text in metadata.items()}
    write_archive(wheel, "pkg", {**KEPT, **LEFT_OUT, **files})
    lock = f"pkg==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    assert install(tmp_path, lock, words=["--trimmed"] if trimmed else []).returncode == 0
    folder = tmp_path / "out" / "site-packages"
    there = {path for path, (mode, _) in contents(folder).items() if stat.S_ISREG(mode)}
    record = {*files, "pkg-1.0.dist-info/RECORD"}
    assert {path for path in there if not path.endswith(".pyc")} == {*KEPT, *([] if trimmed else LEFT_OUT), *record}
    (distribution,) = importlib.metadata.distributions(path=[str(folder)])
    assert {str(file) for file in distribution.files or ()} == there - {path for path in there if path.endswith(".pyc")}


def test_pip_and_uv_leave_the_same_of_packages_of_others(tmp_path: Path, uv: Uv) -> None:
    lock = (ROOT / "compiler" / "planning.lock").read_text()
    trees = []
    for words in (uv, []):
        env = {"PIP_NO_INDEX": "", "PIP_CONFIG_FILE": "", "HOME": os.environ.get("HOME", "/")}
        # The second must not have the byte code of the first: a process that has run uv has imported something else.
        result = install(tmp_path, lock, words=[*words, "--trimmed"], PIP_NO_CACHE_DIR="1", **env)
        assert result.returncode == 0, result.stdout + result.stderr
        trees.append(contents(tmp_path / "out"))
    assert trees[0] == trees[1]
    assert any(path.endswith(".so") for path in trees[0])


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
def test_the_wheels_that_were_installed_are_listed(
    tmp_path: Path, pip: str, words: Uv, request: pytest.FixtureRequest
) -> None:
    python = sys.executable if pip == "this" else request.getfixturevalue("debian12")
    digest = write_wheel(tmp_path)
    lock = f"tiny==1.0 --hash=sha256:{'0' * 64} --hash=sha256:{digest}\n"
    result = install(tmp_path, lock, python, words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "out" / "note.txt").read_text() == ""
    assert json.loads((tmp_path / "out" / "packages.json").read_text()) == {
        "python": platform.python_version(),
        "packages": [{"name": "Tiny", "version": "1.0", "filename": "tiny-1.0-py3-none-any.whl", "sha256": digest}],
    }


def test_an_empty_lock_is_an_empty_environment(tmp_path: Path, words: Uv) -> None:
    assert install(tmp_path, "# nothing\n", words=words).returncode == 0
    assert list((tmp_path / "out" / "site-packages").iterdir()) == []
    assert json.loads((tmp_path / "out" / "packages.json").read_text())["packages"] == []


def test_settings_of_pip_do_not_send_the_packages_elsewhere(tmp_path: Path, words: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    elsewhere = {"PIP_USER": "1", "PIP_TARGET": str(tmp_path / "a"), "PIP_PREFIX": str(tmp_path / "b")}
    assert installed_by(tmp_path, lock, words, **elsewhere) == ("uv" if words else "pip", "")
    assert (tmp_path / "out" / "site-packages" / "tiny.py").exists()


PIP_SAYS = f"models/requirements.lock: pip cannot install the packages for CPython {platform.python_version()} on "


def test_a_wrong_hash_names_the_package_and_both_hashes(tmp_path: Path, uv: Uv) -> None:
    got = write_wheel(tmp_path)
    message = refusal(tmp_path, f"tiny==1.0 --hash=sha256:{'0' * 64}\n", words=uv)
    assert message.startswith(PIP_SAYS)
    assert "someone may have tampered with them" in message
    assert re.search(rf"\n +tiny==1.0 .*\n +Expected sha256 {'0' * 64}\n +Got +{got}\n", message)


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


def test_no_wheel_for_this_python_says_for_which(tmp_path: Path, uv: Uv) -> None:
    digest = write_wheel(tmp_path, "cp27-cp27m-win32")
    message = refusal(tmp_path, f"tiny==1.0 --hash=sha256:{digest}\n", status=3, words=uv)
    assert message.startswith(PIP_SAYS)
    assert "\n  ERROR: No matching distribution found for tiny==1.0\n" in message


def test_a_folder_of_wheels_that_is_not_there(tmp_path: Path, uv: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    assert installed_by(tmp_path, lock, uv, PIP_FIND_LINKS=f"{tmp_path / 'nowhere'} {tmp_path}") == ("uv", "")


def test_an_index_that_cannot_be_reached(tmp_path: Path, uv: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{'0' * 64}\n"
    env: dict[str, str] = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_FIND_LINKS": ""}
    message = refusal(tmp_path, lock, words=uv, **env)  # with status 2: there may be a wheel
    assert message.startswith(PIP_SAYS)
    assert "NewConnectionError" in message
    assert "pip config list" in message


def test_an_index_that_gives_another_digest(tmp_path: Path, uv: Uv) -> None:
    digest = write_wheel(tmp_path)
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    link = f"{wheel.as_uri()}#md5={hashlib.md5(wheel.read_bytes()).hexdigest()}"
    (tmp_path / "simple" / "tiny").mkdir(parents=True)
    (tmp_path / "simple" / "tiny" / "index.html").write_text(f'<!DOCTYPE html><a href="{link}">{wheel.name}</a>')
    env = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": (tmp_path / "simple").as_uri(), "PIP_FIND_LINKS": ""}
    assert refusal(tmp_path, f"tiny==1.0 --hash=sha256:{digest}\n", words=uv, **env) == (
        "models/requirements.lock: Tiny: pip does not say the sha256 of its wheel, only another digest of the index\n"
        "  use an index whose links have #sha256=, or a folder of wheels (PIP_FIND_LINKS)"
    )


def test_an_interpreter_without_pip(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    message = refusal(tmp_path, f"tiny==1.0 --hash=sha256:{'0' * 64}\n", str(tmp_path / "bare" / "bin" / "python"))
    assert "has no pip\n  install it (Debian: apt-get install python3-pip)" in message


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    sys.path.insert(0, str(INSTALLER.parent))
    try:
        return importlib.import_module("python_environment")
    finally:
        sys.path.pop(0)


def test_comments_order_and_line_breaks_of_a_lock_do_not_count(installer: ModuleType) -> None:
    lock = "# made today\nb==2 \\\n  --hash=sha256:bb \\\n  --hash=sha256:aa\na==1 ; os_name == 'nt' --hash=sha256:cc\n"
    same = "a==1  ;  os_name == 'nt' --hash=sha256:cc  # needed by b\nb==2 --hash=sha256:aa --hash=sha256:bb\n"
    assert installer.normalized_pins(lock) == installer.normalized_pins(same)


def test_libraries_that_stagec_does_not_know(installer: ModuleType, tmp_path: Path) -> None:
    """The one that is installed is known; that of TPUs and two of CUDA are other libraries; the last cannot be read."""
    known = examination.library("cpu")
    other = next(file for file in known.parent.glob("*.so") if file != known)
    files = {"jaxlib/libjax_common.so": known, "libtpu/libtpu.so": other}
    files |= dict.fromkeys(PLATFORMS["cuda"].files, other)
    for name, library in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).symlink_to(library)
    damaged = tmp_path / PLATFORMS["rocm"].files[0]
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"not a library")
    assert installer.unknown_libraries(COMPILER / "stagec", tmp_path) == ["cuda", "tpu"]


class Index(SimpleHTTPRequestHandler):
    """An index with one package, and a proxy for every other: it has the same for all hosts."""

    password = ""
    wheels: Counter[str]

    def do_GET(self) -> None:
        """Serve /HOST/PATH for a proxy's http://HOST/PATH, to whom the password is known."""
        self.path = self.path.removeprefix("http://index.invalid")
        self.wheels[self.path] += self.path.endswith(".whl")
        if self.password and self.headers["Authorization"] != f"Basic {self.password}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()
        else:
            super().do_GET()

    def send_header(self, keyword: str, value: str) -> None:
        """Send no validators: who asks again gets the whole file again."""
        if keyword != "Last-Modified":
            super().send_header(keyword, value)

    def log_message(self, *_arguments: object) -> None:
        """Be quiet."""


@contextmanager
def serving(
    folder: Path, password: str = "", certificate: Path | None = None, wheels: Counter[str] | None = None
) -> Iterator[int]:
    """Serve a folder on 127.0.0.1; give its port. wheels: counts how often somebody asks for each wheel."""
    handler = type("Handler", (Index,), {"password": password, "wheels": Counter() if wheels is None else wheels})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write_index(folder: Path) -> str:
    """Write an index with the wheel of `tiny` into a folder; return the wheel's sha256."""
    files = folder / "files"
    files.mkdir()
    digest = write_wheel(files)
    (folder / "simple" / "tiny").mkdir(parents=True)
    link = f'<a href="/files/tiny-1.0-py3-none-any.whl#sha256={digest}">tiny-1.0-py3-none-any.whl</a>'
    (folder / "simple" / "tiny" / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
    return digest


def write_certificates(folder: Path) -> tuple[Path, Path]:
    """Write a certificate authority's certificate, and one of 127.0.0.1 with its key; return both files."""
    now, keys = datetime.now(UTC), [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("an authority", "an index")]
    written = []
    for which, file in enumerate((folder / "authority.pem", folder / "index.pem")):
        builder = x509.CertificateBuilder(names[0], names[which], keys[which].public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=which == 0, path_length=None), critical=True)
        if which == 1:
            address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
            builder = builder.add_extension(address, critical=False)
            key = keys[which].private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        else:
            key = b""
        signed = builder.sign(keys[0], hashes.SHA256())
        file.write_bytes(key + signed.public_bytes(serialization.Encoding.PEM))
        written.append(file)
    return written[0], written[1]


@pytest.mark.parametrize("place", ["variable", "named file", "file of the user", "old file of the user", "environment"])
def test_uv_finds_packages_where_pip_is_set_to(tmp_path: Path, place: str, uv: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_index(tmp_path)}\n"
    password = base64.b64encode(b"me:it's me").decode()
    env = {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": ""}
    python = sys.executable
    with serving(tmp_path, password) as port:
        url = f"http://me:it%27s%20me@127.0.0.1:{port}/simple"
        settings = f"[global]\nno-index = yes\ntimeout = 7.5\n[install]\nno-index = no\nindex-url = {url}\n"
        if place == "variable":
            env |= {"PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull}
        elif place == "environment":
            venv = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(tmp_path / "venv")]
            subprocess.run(venv, check=True)
            python = str(tmp_path / "venv" / "bin" / "python")
            (tmp_path / "venv" / "pip.conf").write_text(settings)
        else:
            files = {"named file": "my.conf", "old file of the user": ".pip/pip.conf"}
            file = tmp_path / files.get(place, ".config/pip/pip.conf")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(settings)
            env |= {"PIP_CONFIG_FILE": str(file)} if place == "named file" else {}
        result = install(tmp_path, lock, python, uv, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "out" / "note.txt").read_text() == ""
    assert (tmp_path / "out" / "site-packages" / "tiny.py").exists()


@pytest.mark.parametrize("trust", ["PIP_CERT", "REQUESTS_CA_BUNDLE", "PIP_TRUSTED_HOST", "nobody"])
def test_uv_trusts_whom_pip_trusts(tmp_path: Path, trust: str, uv: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_index(tmp_path)}\n"
    authority, certificate = write_certificates(tmp_path)
    with serving(tmp_path, certificate=certificate) as port:
        env = {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": f"https://127.0.0.1:{port}/simple"}
        env[trust] = f"127.0.0.1:{port}" if trust == "PIP_TRUSTED_HOST" else str(authority)
        if trust == "nobody":
            said = refusal(tmp_path, lock, words=uv, **env)
            assert "SSL" in said or "server_hostname" in said  # the second is of pip with Python 3.13, by an address
        else:
            assert installed_by(tmp_path, lock, uv, **env) == ("uv", "")


def test_uv_goes_through_pips_proxy(tmp_path: Path, uv: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_index(tmp_path)}\n"
    env = {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "http://index.invalid/simple"}
    with serving(tmp_path) as port:
        env |= {"PIP_PROXY": f"http://127.0.0.1:{port}"}
        assert installed_by(tmp_path, lock, uv, **env) == ("uv", "")


def test_an_extra_index_is_asked_too(tmp_path: Path, uv: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_index(tmp_path)}\n"
    (tmp_path / "empty").mkdir()
    env = {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": (tmp_path / "empty").as_uri()}
    with serving(tmp_path) as port:
        env["PIP_EXTRA_INDEX_URL"] = f"{(tmp_path / 'missing').as_uri()} http://127.0.0.1:{port}/simple"
        assert installed_by(tmp_path, lock, uv, **env) == ("uv", "")


def test_folders_that_pip_passes_over(tmp_path: Path, uv: Uv) -> None:
    (tmp_path / "wheels").mkdir()
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path / 'wheels')}\n"
    assert installed_by(tmp_path, lock, uv, PIP_FIND_LINKS=f"{tmp_path / 'missing'} ~/wheels") == ("uv", "")


def test_a_setting_without_a_word_in_uv_is_named(tmp_path: Path, uv: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    assert installed_by(tmp_path, lock, uv, PIP_IGNORE_REQUIRES_PYTHON="1") == (
        "pip",
        "models/requirements.lock: pip installs it, not uv, which takes longer: "
        "uv has no word for pip's setting ignore-requires-python\n",
    )


def test_constraints_of_pip_hold(tmp_path: Path, words: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    (tmp_path / "allows.txt").write_text("tiny<=1.0\nlarge<3\n")
    (tmp_path / "forbids.txt").write_text("tiny<1.0\n")
    allows = str(tmp_path / "allows.txt")
    assert installed_by(tmp_path, lock, words, PIP_CONSTRAINT=allows) == ("uv" if words else "pip", "")
    message = refusal(tmp_path, lock, words=words, PIP_CONSTRAINT=f"{allows} {tmp_path / 'forbids.txt'}")
    assert "ERROR: Cannot install tiny" in message


def test_a_machine_without_a_wheel_of_uv_says_why_pip_installs(tmp_path: Path) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    assert installed_by(tmp_path, lock, ["--without-uv", "uv==1: no wheel"]) == (
        "pip",
        "models/requirements.lock: pip installs it, not uv, which takes longer: uv==1: no wheel\n",
    )


def test_a_uv_that_does_not_start_says_why_pip_installs(tmp_path: Path) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    installer, note = installed_by(tmp_path, lock, ["--uv", str(tmp_path / "uv")])
    assert (installer, "No such file" in note) == ("pip", True)


def of_several_wheels(folder: Path, locked: int, words: Uv) -> None:
    """Install one of two wheels, for any Python and, better, for this one. locked: how many of them the lock has."""
    tags = ["py3-none-any", f"{PYTHON_TAG}-none-any"]
    digests = [write_wheel(folder, tag, answer) for answer, tag in enumerate(tags)]
    lock = "tiny==1.0 " + " ".join(f"--hash=sha256:{digest}" for digest in digests[:locked]) + "\n"
    assert installed_by(folder, lock, words) == ("uv" if words else "pip", "")
    best = locked - 1
    assert (folder / "out" / "site-packages" / "tiny.py").read_text() == f"ANSWER = {best}\n"
    (listed,) = json.loads((folder / "out" / "packages.json").read_text())["packages"]
    assert (listed["filename"], listed["sha256"]) == (f"tiny-1.0-{tags[best]}.whl", digests[best])


def test_of_several_wheels_the_best(tmp_path: Path, words: Uv) -> None:
    of_several_wheels(tmp_path, 2, words)


def test_of_several_wheels_the_best_that_is_locked(tmp_path: Path, uv: Uv) -> None:
    of_several_wheels(tmp_path, 1, uv)  # pip does not know the digests of a folder's files before it has chosen


def test_what_is_done_to_installed_files_does_not_reach_the_next_environment(tmp_path: Path, uv: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    assert installed_by(tmp_path, lock, uv) == ("uv", "")
    first = contents(tmp_path / "out")
    for path in (tmp_path / "out" / "site-packages").rglob("tiny*"):
        if path.is_file():
            with path.open("ab") as file:
                file.write(b"# edited\n")
    assert installed_by(tmp_path, lock, uv) == ("uv", "")
    assert contents(tmp_path / "out") == first


@pytest.mark.parametrize("setting", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "the lock"])
def test_a_wheel_is_downloaded_once(tmp_path: Path, uv: Uv, setting: str) -> None:
    lock, wheels = f"tiny==1.0 --hash=sha256:{write_index(tmp_path)}\n", Counter[str]()
    with serving(tmp_path, wheels=wheels) as port:
        index = f"http://127.0.0.1:{port}/simple"
        env = {"UV_CACHE_DIR": str(tmp_path / "cache"), "PIP_NO_INDEX": "0", "PIP_FIND_LINKS": ""}
        if setting == "the lock":
            lock = f"--index-url {index}\n{lock}"
        else:
            env |= {"PIP_INDEX_URL": f"http://127.0.0.1:{port}/none"} | {setting: index}
        for _ in range(2):
            assert installed_by(tmp_path, lock, uv, **env) == ("uv", "")
    assert wheels.total() == 1
    assert len(list((tmp_path / "cache" / "archive-v0").iterdir())) == 1


def test_a_damaged_cache_is_noticed_and_not_used(tmp_path: Path, uv: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    env = {"UV_CACHE_DIR": str(tmp_path / "cache")}
    assert installed_by(tmp_path, lock, uv, **env) == ("uv", "")
    first = contents(tmp_path / "out")
    assert install(tmp_path, lock, words=uv, **env).returncode == 0
    assert contents(tmp_path / "out") == first
    (kept,) = (tmp_path / "cache").rglob("tiny.py")
    kept.write_text("ANSWER = 43\n")
    (compiled,) = (tmp_path / "cache" / "stagec-byte-code-2").rglob("*.zip")
    damaged = bytearray(compiled.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    compiled.write_bytes(damaged)
    installer, note = installed_by(tmp_path, lock, uv, **env)
    assert (installer, note) == (
        "uv",
        f"models/requirements.lock: uv's cache {tmp_path / 'cache'} has another tiny.py than the wheel of tiny: it was "
        "downloaded again (uv cache clean tiny mends the cache)\n",
    )
    assert contents(tmp_path / "out") == first


def test_a_file_that_two_packages_have_is_the_one_that_pip_leaves(tmp_path: Path, uv: Uv) -> None:
    lines = []
    for name in ("alpha", "tiny", "omega"):
        files = {"docs/conf.py": f"# {name}\n", f"{name}-1.0.dist-info/METADATA": f"Name: {name}\nVersion: 1.0\n"}
        files[f"{name}-1.0.dist-info/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel = tmp_path / f"{name}-1.0-py3-none-any.whl"
        write_archive(wheel, name, files)
        lines.append(f"{name}==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    left = []
    for words in (uv, []):
        assert installed_by(tmp_path, "".join(lines), words) == ("uv" if words else "pip", "")
        left.append((tmp_path / "out" / "site-packages" / "docs" / "conf.py").read_text())
    assert left == ["# alpha\n", "# alpha\n"]


def write_package(folder: Path, name: str, files: dict[str, str]) -> str:
    """Write the wheel of a package 1.0; return its line of a lock."""
    own = {
        f"{name}-1.0.dist-info/METADATA": f"Name: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    write_archive(wheel, name, files | own)
    return f"{name.replace('_', '-')}==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def test_two_editions_of_a_package_are_refused(tmp_path: Path, words: Uv) -> None:
    """As tensorflow-probability and tfp-nightly: whichever is installed later would win."""
    both = {"same/__init__.py": "", "same/shared.py": "X = 1\n"}
    old = write_package(tmp_path, "same", {**both, "same/a.py": "A = 1\n", "same/b.py": "B = 1\n"})
    new = write_package(tmp_path, "same_nightly", {**both, "same/a.py": "A = 2\n", "same/b.py": "B = 2\n"})
    result = install(tmp_path, old + new, words=words)
    assert result.returncode == 2
    assert result.stdout.endswith(
        "requirements.lock: same and same-nightly write the same 2 files with other bytes: same/a.py and others\n"
        "  keep one of them: take the other out of requirements.in and write the lock again;\n"
        "  if another package wants it, remove its lines from the lock\n"
    )
    assert list((tmp_path / "out").iterdir()) == []
    assert install(tmp_path, new, words=words).returncode == 0


def test_packages_of_one_namespace_and_stray_files_are_installed(tmp_path: Path, words: Uv) -> None:
    lock = ""
    for name in ("alpha", "omega"):
        files = {
            "space/__init__.py": f"# {name}\n",
            f"space/{name}.py": "",
            "tests/test_all.py": f"# {name}\n",
            "LICENSE": name,
            "shared/data.py": "X = 1\n",
        }
        lock += write_package(tmp_path, name, files)
    assert install(tmp_path, lock, words=words).returncode == 0


def test_a_wheel_that_is_not_as_its_record_says_is_installed_as_it_is(tmp_path: Path, uv: Uv) -> None:
    write_wheel(tmp_path)
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {**files, "tiny.py": b"ANSWER = 7\n"}.items():
            archive.writestr(name, content)
    lock = f"tiny==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    assert installed_by(tmp_path, lock, uv) == ("uv", "")
    assert (tmp_path / "out" / "site-packages" / "tiny.py").read_text() == "ANSWER = 7\n"


@pytest.mark.parametrize(
    ("env", "kept"),
    [
        ({}, ".cache/uv"),
        ({"XDG_CACHE_HOME": "{}/xdg", "PIP_CACHE_DIR": "{}/pip"}, "pip/uv"),
        ({"PIP_CACHE_DIR": "{}/pip", "UV_CACHE_DIR": "{}/uv"}, "uv"),
        ({"PIP_NO_CACHE_DIR": "1", "UV_CACHE_DIR": "{}/uv"}, None),
        ({"UV_CACHE_DIR": "{}/requirements.lock/uv"}, None),
    ],
)
def test_where_wheels_are_kept(tmp_path: Path, env: dict[str, str], kept: str | None, uv: Uv) -> None:
    lock = f"tiny==1.0 --hash=sha256:{write_wheel(tmp_path)}\n"
    env = {name: value.format(tmp_path) for name, value in env.items()}
    assert installed_by(tmp_path, lock, uv, **env) == ("uv", "")
    found = {path.parents[2] for path in tmp_path.rglob("stagec-byte-code-2/*/*.zip")}
    assert found == ({tmp_path / kept} if kept else set())
    assert [path for path in tmp_path.rglob("tiny.py") if "archive" in str(path)] != [] if kept else True
