"""What a process reads of its declared files, whatever way it takes, and what it does not read."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from stagec.core.builds.imports import Looked
from tests.building import action_environment

WAYS = {
    "open.txt": "open('open.txt').read()",
    "pathlib.txt": "pathlib.Path('pathlib.txt').read_text()",
    "os_open.txt": "os.open('os_open.txt', os.O_RDONLY)",
    "folder/descriptor.txt": "os.open('descriptor.txt', os.O_RDONLY, dir_fd=os.open('folder', os.O_RDONLY))",
    "elsewhere/relative.txt": "[os.chdir('elsewhere'), open('relative.txt').read(), os.chdir('..')]",
    "linked.txt": "open('link.txt').read()",
    "parts/text.txt": "importlib.resources.files('parts').joinpath('text.txt').read_text()",
    "parts/data.txt": "pkgutil.get_data('parts.module', 'data.txt')",
    "parts/module.py": "importlib.import_module('parts.module')",
    "cached.py": "importlib.import_module('cached')",
    "removed.py": "[importlib.import_module('removed'), sys.modules.pop('removed')]",
    "run.py": "runpy.run_path('run.py')",
    "source.py": "linecache.getlines('source.py')",
    "array.npy": "np.load('array.npy')",
    "mapped.npy": "np.load('mapped.npy', mmap_mode='r')",
    "numbers.bin": "np.fromfile('numbers.bin')",
    "memory.bin": "np.memmap('memory.bin', mode='r')",
    "thread.txt": "[thread := threading.Thread(target=open, args=('thread.txt',)), thread.start(), thread.join()]",
    # Its size is content too.
    "size.bin": "os.path.getsize('size.bin')",
    "stat.bin": "pathlib.Path('stat.bin').stat()",
    "lstat.bin": "os.lstat('lstat.bin')",
    "listed/sizes.bin": "sum(entry.stat().st_size for entry in os.scandir('listed'))",
}
SCRIPT = """
import importlib, importlib.resources, json, linecache, os, pathlib, pkgutil, runpy, sys, threading
import numpy as np
from stagec.frontends.common.reads import Reads

sys.path.insert(0, os.getcwd())
reads = Reads()
for way in json.loads(sys.argv[1]):
    exec(way, {**globals()})
print(json.dumps(reads.unread(json.loads(sys.argv[2]))))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for each way, and files that nobody reads."""
    monkeypatch.chdir(tmp_path)
    for name in [*WAYS, "other.py", "other.txt", "folder/other.txt", "listed/below/other.txt", "empty.txt", "data.txt"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if path.suffix == ".py" else b"12345678")
    for name in ("array.npy", "mapped.npy"):
        np.save(name, np.arange(3))
    (tmp_path / "link.txt").symlink_to("linked.txt")
    subprocess.run([sys.executable, "-m", "compileall", "-q", "cached.py"], check=True)
    return tmp_path


def unread(ways: list[str], files: list[str]) -> list[str]:
    """Which of `files` a process does not read that goes these ways."""
    done = subprocess.run(
        [sys.executable, "-B", "-s", "-S", "-c", SCRIPT, json.dumps(ways), json.dumps(files)],
        env=action_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_what_is_read_in_any_way_is_seen(folder: Path) -> None:
    others = ["other.py", "other.txt", "folder/other.txt", "listed/below/other.txt"]
    assert unread(list(WAYS.values()), [*WAYS, *others]) == others


def test_what_is_not_there_is_not_called_unread(folder: Path) -> None:
    assert unread([], ["folder", "missing.txt", "other.txt", "other.py"]) == ["other.txt", "other.py"]


def test_names_alone_are_no_content(folder: Path) -> None:
    ways = [
        "os.listdir('listed')",
        "list(pathlib.Path('listed').iterdir())",
        "list(os.walk('listed'))",
        "list(pkgutil.iter_modules(['.']))",
        "importlib.util.find_spec('other')",
    ]
    assert unread(ways, ["listed/sizes.bin", "other.py"]) == ["listed/sizes.bin", "other.py"]


def test_stat_stays_what_programs_expect(folder: Path) -> None:
    ways = [
        "assert os.stat in os.supports_follow_symlinks and os.stat in os.supports_fd and os.stat in os.supports_dir_fd",
        "assert os.stat('link.txt', follow_symlinks=False) == os.lstat('link.txt') != os.stat('link.txt')",
        "assert os.stat(0) and type('Way', (), {'stat': os.stat})().stat('other.txt')",
        "[os.mkdir('gone'), __import__('shutil').rmtree('gone')]",
    ]
    assert unread(ways, ["data.txt"]) == ["data.txt"]


def test_native_code_of_others_may_read_any_data(folder: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(3)}, "weights.safetensors")
    files = ["weights.safetensors", "other.txt", "other.py"]
    for way in (
        "importlib.import_module('safetensors.numpy').load_file('weights.safetensors')",
        "importlib.import_module('ctypes').CDLL(None).getpid()",
    ):
        assert unread([way], files) == ["other.py"]
    assert unread(["import ctypes, jax"], files) == files  # whose own native code is known


LOOKED = Looked(
    {"parts": {"module": ["module.py"]}, ".": {"parts": ["parts", "parts/"]}},
    {".": ["here", "own", "parts"], "here": ["parts"]},
)
ASKS = f"""
import importlib.machinery, shutil, subprocess, tempfile
from stagec.core.builds.imports import from_json
print(reads.names_matter(from_json({LOOKED.to_json()!r}), ["own/output.txt"]))
"""


def why_names_matter(way: str) -> str:
    """Why a process that goes this way is built again when a file is added; "" if it is not."""
    script = SCRIPT.rpartition("print")[0] + f"looked = {LOOKED.to_json()!r}\n" + ASKS
    done = subprocess.run(
        [sys.executable, "-B", "-s", "-S", "-c", script, json.dumps([way])],
        env=action_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("os.listdir('here/parts')", "it lists the files of here/parts"),
        ("list(pathlib.Path('here/parts').glob('*.py'))", "it lists the files of here/parts"),
        ("list(os.walk('here/parts'))", "it lists the files of here/parts"),
        ("list(importlib.import_module('pkgutil').iter_modules(['here/parts']))", "it lists the files of here/parts"),
        ("os.listdir(os.open('here/parts', os.O_RDONLY))", "it lists a folder by a descriptor"),
        ("os.path.exists('here/parts/none.txt')", "it looks in vain for here/parts/none.txt"),
        ("os.access('here/parts/none.txt', os.R_OK)", "it looks in vain for here/parts/none.txt"),
        ("pathlib.Path('here/parts/none.txt').is_file()", "it looks in vain for here/parts/none.txt"),
        (
            "exec('try: open(\"here/parts/none.txt\")\\nexcept OSError: pass')",
            "it looks in vain for here/parts/none.txt",
        ),
        (
            "os.stat in os.supports_dir_fd and os.path.exists('here/parts/none.txt')",
            "it looks in vain for here/parts/none.txt",
        ),
        ("os.open('text.txt', 0, dir_fd=os.open('parts', os.O_RDONLY))", "it opens 'text.txt' below a descriptor"),
        ("importlib.util.find_spec('parts.none')", "it imports none from parts, which no source says"),
        (
            "importlib.machinery.PathFinder.find_spec('none', ['parts'])",
            "it imports none from parts, which no source says",
        ),
        ("os.system('true')", "it starts a process: os.system"),
        ("importlib.import_module('subprocess').run(['true'])", "it starts a process: true"),
        (
            "importlib.import_module('ctypes').CDLL(None).getpid()",
            "what ctypes calls is native code, which may open any file",
        ),
        (
            "importlib.import_module('safetensors.numpy')",
            "safetensors._safetensors_rust is native code, which may open any file",
        ),
    ],
)
def test_another_file_may_matter(folder: Path, way: str, why: str) -> None:
    (folder / "here" / "parts").mkdir(parents=True)
    assert why_names_matter(way) == why


@pytest.mark.parametrize(
    "way",
    [
        "open('open.txt').read()",
        "os.path.exists('open.txt')",
        "importlib.import_module('parts.module')",
        "importlib.util.find_spec('unknown')",
        "os.listdir('here')",
        "os.path.exists('here/none') or os.path.exists('nowhere/deep/file')",
        "os.path.exists('own/output.txt')",
        "open('here/parts/new.txt', 'w').write('made')",
        "importlib.import_module('tempfile').TemporaryDirectory().cleanup()",
        "os.path.exists('/nowhere') or os.listdir('/usr')",
        "exec('import jax, ml_dtypes')",
        "exec('import subprocess\\ntry: subprocess.run([\"fc-list\"], capture_output=True)\\nexcept OSError: pass')",
    ],
)
def test_no_other_file_matters(folder: Path, way: str) -> None:
    (folder / "here" / "parts").mkdir(parents=True)
    assert why_names_matter(way) == ""


@pytest.mark.parametrize(
    "way",
    [
        "os.system('true')",
        "importlib.import_module('subprocess').run(['true'])",
        "os.fork() or os._exit(0)",
        "importlib.import_module('multiprocessing').get_context('spawn').Process(target=int).start()",
    ],
)
def test_another_process_may_read_anything(folder: Path, way: str) -> None:
    assert unread([way], ["other.txt", "other.py"]) == []
