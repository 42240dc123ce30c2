"""The standard's own tests (https://github.com/data-apis/array-api-tests), outside a trace and inside `jit`.

They are not in this repository; MISSING says how to get them. NOT_PASSING is all that fails there, in both ways.

Modules: `stagec_arrays/namespace/*.py`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.building import ROOT

FOLDER = os.environ.get("STAGEC_ARRAY_API_TESTS", "")
MISSING = (
    "the standard's suite is not here: run `git clone --recurse-submodules https://github.com/data-apis/array-api-tests`"
    " and `pip install ndindex pytest-json-report`, and set STAGEC_ARRAY_API_TESTS to the folder of the clone"
)
NOT_PASSING: dict[str, dict[str, str]] = {
    "outside": {},
    "inside": {
        r"test_repeat$": "the size of the result is the sum of repeats, an array whose elements a trace does not know"
    },
}
MODULES = {
    "outside": "stagec_arrays.numpy",
    "inside": "exec('from compiler.extensions.arrays.tests.jitted import xp')",
}


@pytest.mark.skipif(not FOLDER, reason=MISSING)
@pytest.mark.parametrize("where", MODULES)
def test_the_standard(where: str, tmp_path: Path) -> None:
    assert Path(FOLDER, "array_api_tests").is_dir(), MISSING
    environment = {
        **os.environ,
        "ARRAY_API_TESTS_MODULE": MODULES[where],
        "JAX_ENABLE_X64": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path),  # and not the checkout
        "PYTHONPATH": os.pathsep.join([str(ROOT / "compiler"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "array_api_tests", "--max-examples", "10", "--disable-deadline", "-q"]
    command += ["-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True)
    assert "passed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    listed = NOT_PASSING[where]
    assert [name for name in failed if not any(re.match(pattern, name) for pattern in listed)] == []
    assert [pattern for pattern in listed if not any(re.match(pattern, name) for name in failed)] == []
