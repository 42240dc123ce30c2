"""`jnp.arctan` is right under all instruction sets: a report says that it is not, from 50 elements on (jax#39352)."""

import os
import subprocess
import sys

import pytest

from stagec.backends.cpu import compiler as cpu
from stagec.core.builds.specs import CpuTarget
from tests.building import COMPILER, ROOT

_WRONG = """
import sys
from stagec.backends.cpu import compiler as cpu
from stagec.core.builds.specs import CpuTarget
target = CpuTarget("it", sys.argv[1], 2, {})
cpu.prepare_process(target)
import jax, jax.numpy as jnp, numpy as np, stagec
jax.config.update("jax_enable_x64", True)
NEAR = {"float32": 2e-6, "float64": 1e-14}
given = [
    np.concatenate([np.linspace(-5, 5, n - n // 2), np.geomspace(1e-3, 1e6, max(n // 2, 1))])[:n].astype(dtype)
    for dtype in NEAR for n in (1, 32, 49, 50, 1000)
]
compiled = stagec.jit(lambda *xs: [jnp.arctan(x) for x in xs]).lower(*given).compile(target=target)
try:
    results = compiled(*given)
except stagec.LoadError as error:
    sys.exit(f"cannot run: {error}")
for x, y in zip(given, results, strict=True):
    off = np.abs(np.asarray(y) - np.arctan(np.float64(x))).max()
    if not off <= NEAR[x.dtype.name]:
        print(x.dtype.name, len(x), off)
"""


@pytest.mark.parametrize("isa", ["AVX", "AVX2", "AVX512"])
def test_arctan(isa: str) -> None:
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    env = {"PYTHONPATH": os.pathsep.join([*packages, str(COMPILER), str(ROOT)]), "JAX_PLATFORMS": "cpu"}
    env |= cpu.environment(CpuTarget("it", isa, 2, {}))
    done = subprocess.run([sys.executable, "-B", "-s", "-c", _WRONG, isa], env=env, capture_output=True, text=True)
    if done.stderr.startswith("cannot run:"):
        pytest.skip(done.stderr)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
