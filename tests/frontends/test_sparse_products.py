"""Custom calls that jaxlib provides: their programs run in a process that has no JAX.

Modules: `pjrt/custom_calls.py`.
"""

import subprocess
import sys
from pathlib import Path

from stagec.pjrt import custom_calls
from tests.building import action_environment
from tests.frontends.workspace import export, spec

SPARSE = """
from jax.experimental import sparse


def f(data, indices, starts, x):
    return sparse.BCSR((data, indices, starts), shape=(3, 4)) @ x
"""
CALL = """
import sys
sys.modules["jax"] = None
import numpy as np
import stagec
from jaxlib import cpu_sparse

data, indices, starts = np.float32([2, 3, 5]), np.int32([1, 0, 3]), np.int32([0, 1, 2, 3])
dense = np.float32([[0, 2, 0, 0], [3, 0, 0, 0], [0, 0, 0, 5]])
x = np.arange(4, dtype=np.float32)
exported = stagec.Exported.deserialize(open(sys.argv[1], "rb").read())
np.testing.assert_array_equal(exported.call(data, indices, starts, x), dense @ x)
"""


def test_a_product_with_a_sparse_matrix_runs_without_jax(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SPARSE)
    status, said, output = export(tmp_path, spec(entry="model:f", args=["f32[3]", "i32[3]", "i32[4]", "f32[4]"]))
    assert (status, said) == (0, "")
    command = [sys.executable, "-c", CALL, str(output)]
    done = subprocess.run(command, env=action_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert custom_calls.provider("cpu_csr_sparse_dense_ffi") == custom_calls.TOOLCHAIN
    assert custom_calls.provider("cpu_csr_sparse_of_others") == custom_calls.UNKNOWN
