"""A bundle gives, without JAX, the results that jax.jit gives, bit for bit.

Modules: `loader/function.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

import stagec
from tests.building import COMPILER, ROOT
from tests.zoo import effects


def _run(script: str, *arguments: Path) -> None:
    site_packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    path = os.pathsep.join([*site_packages, str(COMPILER), str(ROOT)])
    command = [sys.executable, "-B", "-s", str(ROOT / "tests" / "zoo" / script), *map(str, arguments)]
    done = subprocess.run(command, env={"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_bundle_computes_what_jax_jit_computes(zoo: Path, tmp_path: Path) -> None:
    served, expected = tmp_path / "served.npz", tmp_path / "expected.npz"
    _run("serve.py", zoo, served)
    _run("reference.py", expected)
    with np.load(served) as ours, np.load(expected) as jax:
        assert sorted(ours.files) == sorted(jax.files)
        assert len(ours.files) >= 20
        different = [name for name in ours.files if ours[name].tobytes() != jax[name].tobytes()]
    assert different == []


def test_a_function_with_effects_computes_the_same_in_this_process(zoo: Path) -> None:
    exported = stagec.Exported.deserialize((zoo.parent / "zoo.effectful.exported").read_bytes())
    rng = np.random.default_rng(0)
    for size in (3, 5):
        args = [rng.normal(size=(size,)).astype(np.float32) for size in (4, 2, size)]
        expected = jax.jit(effects.effectful)(*args)
        for result in (exported.call(*args), stagec.jit(effects.effectful)(*args)):
            assert sorted(result) == sorted(expected)
            assert [result[name].tobytes() for name in result] == [np.asarray(expected[n]).tobytes() for n in result]
