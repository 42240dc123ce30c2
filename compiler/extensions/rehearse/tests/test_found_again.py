"""Programs as people write them, none changed: rehearsed and built, each finds in the folder all that it compiles.

Modules: `stagec_rehearse/programs.py`, `stagec_rehearse/report.py`, `stagec_rehearse/observing.py`,
`stagec_rehearse/page.py`.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest

from compiler.extensions.rehearse.tests.processes import ALL, PROGRAMS, built, found_again, specified, stagec
from stagec_rehearse import programs
from tests.building import build_jax_cache

CALLS_BACK = """
import jax, sys
import numpy as np

@jax.jit
def told(x):
    jax.debug.print("x {}", x)
    return x * 2

size = int(sys.argv[1])
told(np.ones(size, np.float32))
print(jax.jit(lambda x: x + 1)(np.ones(size, np.float32)).shape)
"""


@pytest.mark.pinned(but=4)
@pytest.mark.parametrize("name", PROGRAMS if ALL else ["equinox_loop"])
def test_a_program_finds_all_that_it_compiles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKETS", "12" if ALL else "2")
    if name == "blackjax_nuts" and not importlib.util.find_spec("blackjax"):
        pytest.skip("there is no BlackJAX")
    result = found_again(name, "cpu", "cpu-avx2", PROGRAMS[name], tmp_path)
    assert result.found == result.compiled >= result.built >= 20, result.said
    assert result.status == 0, result.said


def test_what_is_not_found_is_told(tmp_path: Path) -> None:
    """With its reason, and without what JAX never keeps."""
    (tmp_path / "program.py").write_text(CALLS_BACK)
    run = ("--", sys.executable, "program.py")
    done = stagec("rehearse", "--device", "cpu", *run, "4", cwd=tmp_path)
    assert (
        "not built, so JAX compiles it at each start:\n"
        "  jit_told (program.py:11): it calls back into Python, and JAX keeps no such program"
    ) in done.stdout, done.stdout
    listed = programs.read(str(tmp_path / "rehearsal" / programs.NAME))
    (told,) = (program for program in listed.programs if program.not_kept)
    assert (told.name, told.file) == ("jit_told", "")
    cache, count = built(tmp_path / "rehearsal", "cpu-avx2", tmp_path)
    assert count == 1
    checked = ("rehearse", "--device", "cpu", "--jax-cache", cache)
    done = stagec(*checked, *run, "4", cwd=tmp_path)
    assert (done.returncode, "found in JAX's cache:\n  1 of 2 compilations\n" in done.stdout) == (0, True), done.stdout
    assert "not found:" not in done.stdout
    kept = sorted(path.name for path in cache.iterdir())
    done = stagec(*checked, *run, "5", cwd=tmp_path)
    assert (done.returncode, "found in JAX's cache:\n  0 of 2 compilations\n" in done.stdout) == (1, True), done.stdout
    assert (
        "not found:\n  jit__lambda (program.py:12): computation: the program is another one: the function, sh"
        in done.stdout
    )
    assert sorted(path.name for path in cache.iterdir()) == kept  # what is missed is not written
    done = stagec("rehearse", "--device", "cpu", "--jax-cache", "rehearsal", *run, "4", cwd=tmp_path)
    assert done.returncode == 2
    assert "rehearsal/stagec.json: cannot be read: No such file" in done.stderr


def has_an_address() -> bool:
    """Whether this machine's name stands for an address, where JAX's gloo listens. In a chroot it stands for none."""
    try:
        return bool(socket.getaddrinfo(socket.gethostname(), None))
    except OSError:
        return False


@pytest.mark.skipif(not has_an_address(), reason="this machine's name has no address")
def test_a_program_of_several_processes(tmp_path: Path) -> None:
    """On CPUs, JAX computes what it computes in real ones; their programs are not built."""
    shutil.copy(Path(__file__).parent / "programs" / "data_parallel.py", tmp_path)
    words = (
        "rehearse",
        "--device",
        "cpu",
        "--devices",
        "2",
        "--processes",
        "2",
        "--",
        sys.executable,
        "data_parallel.py",
    )
    done = stagec(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rehearsed on cpu, 2 processes: " in done.stdout
    said = sorted(line.split() for line in done.stdout.splitlines() if re.match("[01] 4 2 ", line))
    assert [words[0] for words in said] == ["0", "1"]
    assert said[0][-1] == said[1][-1] != "0.0"
    listed = programs.read(str(tmp_path / "rehearsal" / programs.NAME))
    assert (listed.devices, listed.processes) == (2, 2)
    done = specified(
        tmp_path / "rehearsal", "cpu-avx2", sorted((tmp_path / "rehearsal" / "programs").iterdir()), tmp_path
    )
    assert (done.returncode, "the keys of several processes on CPUs have numbers" in done.stderr) == (2, True)
    (tmp_path / "fails.py").write_text(
        "import jax, os, time\njax.distributed.initialize()\n"
        "time.sleep(600) if jax.process_index() else os._exit(3)\n"  # at another exit, JAX waits for the other
    )
    done = stagec(*words[:-1], "fails.py", cwd=tmp_path)
    assert (done.returncode, "until it failed with status 3" in done.stdout) == (1, True), done.stdout


def test_the_page_has_all_programs(tmp_path: Path) -> None:
    """And what there is to tell of them; it loads nothing, and its policy allows its own script."""
    (tmp_path / "program.py").write_text(CALLS_BACK)
    words = ("rehearse", "--device", "cpu", "--report", "page.html", "--", sys.executable, "program.py", "4")
    assert stagec(*words, cwd=tmp_path).returncode == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    rows = re.findall(r'<td title="(.*?)">(.*?)</td><td>(.*?)</td></tr>', page)
    assert sorted(rows) == [
        ("(f32[4]) -&gt; f32[4]", "jit__lambda", "program.py:12"),
        ("(f32[4]) -&gt; f32[4]", "jit_told", "program.py:11"),
    ]
    assert "<li>jit_told (program.py:11): it calls back into Python, and JAX keeps no such program</li>" in page
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "//" not in re.sub(r"<script>.*", "", page, flags=re.DOTALL)


def test_a_function_of_a_manifest_is_the_same_entry(tmp_path: Path) -> None:
    """A program that is in a manifest and in programs.toml has one name and the same bytes in both folders."""
    (tmp_path / "small.toml").write_text(
        '[manifest]\nname = "small"\nversion = "1"\njax_cache = true\n'
        '[functions.double]\nentry = "small:double"\nargs = ["f32[4]"]\ntargets = ["cpu-avx2"]\n'
    )
    (tmp_path / "small.py").write_text("def double(x):\n    return x * 2\n")
    (tmp_path / "program.py").write_text(
        "import sys\nsys.path.insert(0, '')\nimport jax, numpy as np\nfrom small import double\n"
        "jax.jit(double)(np.arange(4, dtype=np.float32))\n"
    )
    listed = build_jax_cache("small.toml", tmp_path / "out", tmp_path)
    rehearsed = stagec("rehearse", "--device", "cpu", "--", sys.executable, "program.py", cwd=tmp_path)
    assert rehearsed.returncode == 0, rehearsed.stderr
    cache, _ = built(tmp_path / "rehearsal", "cpu-avx2", tmp_path)
    entries = [
        {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}
        for folder in (listed, cache)
    ]
    assert entries[0] == entries[1]
    assert len(entries[0]) == 4
