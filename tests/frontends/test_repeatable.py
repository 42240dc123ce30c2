"""Models that read a clock or draw random numbers: the same bytes in each build, and golden outputs that fit."""

import datetime
import os
import random
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from stagec.frontends.common import repeatable
from tests.building import checked, stagec, write_specs

# Each is a number that differs from process to process in plain Python.
WAYS = {
    "time": "time.time()",
    "time_ns": "time.time_ns() % 1000000007",
    "from_time": "now()",
    "monotonic": "time.monotonic()",
    "perf_counter": "time.perf_counter_ns() % 1000003",
    "clock": "time.clock_gettime(time.CLOCK_REALTIME)",
    "localtime": "time.mktime(time.localtime())",
    "strftime": "int(time.strftime('%S%H')) + len(time.ctime() + time.asctime())",
    "slept": "[time.sleep(0.01), time.time()][1]",
    "datetime": "datetime.datetime.now().timestamp()",
    "from_datetime": "DateTime.now(datetime.timezone.utc).timestamp()",
    "date": "datetime.date.today().toordinal()",
    "local": "datetime.datetime.now().hour",
    "random": "random.random()",
    "generator": "random.Random().random()",
    "seeded_anew": "[random.seed(), random.random()][1]",
    "system": "random.SystemRandom().random()",
    "numpy": "onp.random.normal()",
    "numpy_generator": "onp.random.default_rng().normal()",
    "numpy_state": "onp.random.RandomState().normal()",
    "numpy_seeded_anew": "[onp.random.seed(), onp.random.normal()][1]",
    "urandom": "sum(os.urandom(8)) + sum(os.getrandom(8))",
    "uuid4": "uuid.uuid4().int % 1000003",
    "uuid1": "uuid.uuid1().int % 1000003",
    "secrets": "secrets.randbelow(1000003)",
}
MODEL = """
import datetime, os, random, secrets, time, uuid
from datetime import datetime as DateTime
from time import time as now

import numpy as onp
import {numpy} as np

imported = [{ways}]
initial = onp.random.normal(size=3).astype("float32")


def avals():
    return (onp.zeros(3 + random.randrange(5), "float32"),)


def f(x):
    read = onp.array([{ways}, *imported], "float32")
    return x + initial.sum(), np.asarray(read), np.asarray(onp.random.normal(size=3).astype("float32"))
"""
HEAD = """
[manifest]
name = "m"
version = "1.0.0"
[targets]
cpu = { platform = "cpu", isa = "AVX2" }
"""
MANIFEST = """
[functions.f]
frontend = "{frontend}"
entry = "model:f"
avals = "model:avals"
targets = ["cpu"]
vjp_order = 0
[functions.f.golden]
"""


def workspace(folder: Path, frontend: str) -> Path:
    """A folder with a model that reads everything, at import, in the function and for its avals."""
    folder.mkdir()
    numpy = {"jax": "jax.numpy", "arrays": "stagec_arrays.numpy"}[frontend]
    (folder / "model.py").write_text(MODEL.format(numpy=numpy, ways=", ".join(WAYS.values())))
    (folder / "m.toml").write_text(HEAD + MANIFEST.format(frontend=frontend))
    return folder


def exported(root: Path, **env: str) -> bytes:
    """Export in a fork, or with `env` in a new process; return the artifact's bytes."""
    write_specs("m.toml", root, root)
    words = ["--spec", "m.f.spec", "--output", "f.exported", "--description", "f.json", "--import-root", "."]
    done = stagec("action", "export", *words, cwd=root, env=env or None)
    assert done.returncode == 0, done.stderr
    return (root / "f.exported").read_bytes()


@pytest.mark.parametrize("frontend", ["jax", "arrays"])
def test_a_model_that_reads_clocks_and_chance_is_the_same_in_each_build(tmp_path: Path, frontend: str) -> None:
    first, second = (workspace(tmp_path / name, frontend) for name in ("a", "b"))
    forked = exported(first)
    time.sleep(0.01)
    # A process that imports everything itself, elsewhere.
    alone = exported(second, TZ="Asia/Tokyo", PYTHONHASHSEED="0")
    assert forked == alone
    golden = []
    for root in (first, second):
        words = ["--spec", "m.f.spec", "--exported", "f.exported", "--description", "f.json", "--import-root", "."]
        checked("action", "golden", *words, "--output", "f.golden", cwd=root)
        golden.append((root / "f.golden").read_bytes())
    assert golden[0] == golden[1]
    # Golden outputs are of the program that was exported: of the same numbers.
    from safetensors.numpy import load

    arrays = load(golden[0])
    read = arrays["result[1]"]
    named = dict(zip(WAYS, read.tolist(), strict=False))
    assert named["localtime"] == named["time"] == np.float32(repeatable.START / 10**9)
    assert named["local"] == 0
    from stagec.stages.exported import Exported

    given = arrays["args[0]"]
    for name, value in zip(
        ("result[0]", "result[1]", "result[2]"), Exported.deserialize(forked).call(given), strict=True
    ):
        np.testing.assert_array_equal(arrays[name], value)


def test_what_a_model_seeds_itself_is_what_plain_python_gives(tmp_path: Path) -> None:
    lines = "import numpy as onp, random\nimport jax.numpy as np\nonp.random.seed(3)\nrandom.seed(4)\n"
    lines += "def f(x):\n    return x + onp.array([onp.random.rand(), random.random()], 'float32')\n"
    (tmp_path / "model.py").write_text(lines)
    (tmp_path / "m.toml").write_text(HEAD + '[functions.f]\nentry = "model:f"\nargs = ["f32[2]"]\ntargets = ["cpu"]\n')
    from stagec.stages.exported import Exported

    wanted = [np.random.RandomState(3).rand(), random.Random(4).random()]
    result = Exported.deserialize(exported(tmp_path)).call(np.zeros(2, np.float32))
    np.testing.assert_array_equal(result, np.array(wanted, np.float32))


def test_afterwards_all_is_as_before() -> None:
    functions = [time.time, time.sleep, os.urandom, uuid.uuid1, random.seed, vars(datetime.datetime)["now"]]
    random.seed(5)
    np.random.seed(5)
    zone, before = time.tzname, random.getstate()
    with repeatable.clock_and_chance():
        assert abs(time.time() - repeatable.START / 10**9) < 1
        assert datetime.datetime.now().year == 2020
        random.random(), np.random.rand()
    assert functions == [time.time, time.sleep, os.urandom, uuid.uuid1, random.seed, vars(datetime.datetime)["now"]]
    assert (time.tzname, random.getstate()) == (zone, before)
    assert np.random.rand() == np.random.RandomState(5).rand()
    assert datetime.datetime.now().year > 2020


def test_loops_that_wait_for_a_time_end() -> None:
    with repeatable.clock_and_chance():
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            time.sleep(0.005)
        end = time.perf_counter() + 0.01
        while time.perf_counter() < end:
            pass
