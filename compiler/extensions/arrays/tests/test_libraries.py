"""Functions of SciPy, scikit-learn, array-api-extra and einops, untouched: libraries.py runs them in a process.

Modules: `stagec_arrays/namespace/*.py`, `stagec_arrays/numpy/*.py`.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.building import COMPILER, EXTENSIONS, ROOT


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    for library in ("array_api_extra", "einops"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} of tests/requirements.lock is not installed")
    command = [sys.executable, "-m", "compiler.extensions.arrays.tests.libraries"]
    paths = os.pathsep.join([str(COMPILER), *EXTENSIONS, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def listed(table: str) -> dict[str, Any]:
    """A table of libraries.py, which only that process can import."""
    text = (COMPILER / "extensions" / "arrays" / "tests" / "libraries.py").read_text()
    names = text.partition(f"{table} = {{")[2].partition("}")[0]
    return {line.split('"')[1]: line for line in names.splitlines() if '"' in line}


def test_outside_of_a_trace_values_are_numpys(found: dict[str, list[str]]) -> None:
    refused = {name: said for name, (said, _) in found.items() if said}
    assert refused.keys() == listed("WRITES").keys()
    for name, said in refused.items():
        assert "NumPy has this array as a view of another array, whose elements would stay as they are" in said, name


def test_in_a_trace_values_are_numpys_but_of_those_with_a_reason(found: dict[str, list[str]]) -> None:
    refused = {name: said for name, (_, said) in found.items() if said}
    assert refused.keys() == listed("CANNOT").keys()
    # The error names the library's line that needs or writes elements. None gives other values.
    kinds = {name: "TypeError: /" if name in listed("WRITES") else "TracerError: /" for name in refused}
    assert {name: said for name, said in refused.items() if not said.startswith(kinds[name])} == {}
    works = found.keys() - refused.keys()
    expected = {"stats.": 10, "xpx.": 8, "einops.": 4, "sklearn.": 10, "optimize.": 4, "fft.": 6, "signal.": 7}
    for library, least in expected.items():
        assert sum(name.startswith(library) for name in works) >= least, library
