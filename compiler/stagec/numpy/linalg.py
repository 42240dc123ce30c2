"""Linear algebra of the array API standard, on stagec's arrays (https://data-apis.org/array-api/2024.12/extensions/linear_algebra_functions.html).

Functions work in a trace and outside one, on batches of matrices, and have derivatives. On CPUs they call LAPACK, on
accelerators what JAX calls there. `eig` and `eigvals` are those of 2025.12, for CPUs.
"""

from stagec.arrays.namespace.linalg import (
    cholesky,
    det,
    eig,
    eigh,
    eigvals,
    eigvalsh,
    inv,
    matrix_norm,
    matrix_power,
    matrix_rank,
    pinv,
    qr,
    slogdet,
    solve,
    svd,
    svdvals,
    vector_norm,
)
from stagec.arrays.namespace.linear import (
    cross,
    diagonal,
    matmul,
    matrix_transpose,
    outer,
    tensordot,
    trace,
    vecdot,
)

__all__ = [
    "cholesky",
    "cross",
    "det",
    "diagonal",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "inv",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "trace",
    "vecdot",
    "vector_norm",
]
