"""A jaxlib that is newer than all that stagec was tested with: a program in a child decides, and no number.

Modules: `pjrt/probe_program.py`.
"""

import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

from stagec.pjrt import compatibility, probe
from tests.building import COMPILER

NEWER = f"jaxlib {compatibility.version()} is newer than the releases that stagec was tested with"
CRASHES = """
def make_cpu_client(*_, **__):
    import os, signal
    os.kill(os.getpid(), signal.SIGSEGV)
"""
WRONG = """
import ml_dtypes, numpy
numpy.tanh = numpy.sinh
"""


def said(folder: Path, changed: str) -> str:
    """What stagec says of the installed jaxlib if it was tested with older ones, with lines more in its xla_client."""
    package = folder / "jaxlib"
    package.mkdir()
    for file in Path(jaxlib.__file__).parent.iterdir():
        if file.name == "xla_client.py":
            (package / file.name).write_text(file.read_text() + changed)
        elif file.name != "__pycache__":
            (package / file.name).symlink_to(file)
    packages = [str(folder), str(COMPILER), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    program = f"import sys; sys.path[:0] = {packages!r}\nfrom stagec.pjrt import compatibility, probe\n"
    program += "compatibility.BEFORE = (0, 9)\nprint(probe.refusal())"
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_one_that_does_what_is_asked_of_it(tmp_path: Path) -> None:
    out = said(tmp_path, "")
    assert out.startswith("None\n")
    assert f"RuntimeWarning: {NEWER}; a small program is right there" in out


@pytest.mark.parametrize(
    ("changed", "how"),
    [
        ("del make_cpu_client\n", "no attribute 'make_cpu_client'"),
        (CRASHES, "ended with SIGSEGV"),
        (WRONG, "it has wrong results"),
    ],
    ids=["lacks", "crashes", "wrong"],
)
def test_one_that_does_not(tmp_path: Path, changed: str, how: str) -> None:
    out = said(tmp_path, changed)
    assert out.startswith(f"{NEWER}, and a small program fails there (")
    assert how in out
    assert "install one before 0.9, or upgrade stagec" in out


def test_the_installed_one_is_of_the_tested_range() -> None:
    assert compatibility.OLDEST <= compatibility.numbers() < compatibility.BEFORE
    assert probe.refusal() is None


def test_one_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "version", lambda: "0.9.2")
    assert probe.refusal() == "jaxlib 0.9.2 is too old for stagec: install 0.10.1 or newer"
