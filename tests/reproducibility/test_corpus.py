"""One hash for each program of the corpus, however often and in whatever circumstances it is built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.building import another_release

BUILDS = os.environ.get("STAGEC_CORPUS_BUILDS")


@pytest.mark.skipif(not BUILDS, reason="minutes of builds: STAGEC_CORPUS_BUILDS says how many of each program")
def test_every_program_has_one_hash() -> None:
    script, another = Path(__file__).absolute().parent / "corpus.py", another_release()
    done = subprocess.run(
        [sys.executable, str(script), "--builds", BUILDS or "", "--pythons", *(another[:1] if another else ())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("artifacts, 0 with more than one hash\n")
    assert len(done.stdout.splitlines()) > 2 * 30
