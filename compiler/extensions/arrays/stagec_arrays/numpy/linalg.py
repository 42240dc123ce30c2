"""Linear algebra of the array API standard, on stagec's arrays (https://data-apis.org/array-api/2024.12/extensions/linear_algebra_functions.html).

Functions work in a trace and outside one, on batches of matrices, and have derivatives. On CPUs they call LAPACK, on
accelerators what JAX calls there. `eig` and `eigvals` are those of 2025.12, for CPUs.
"""

from stagec_arrays.namespace.linalg import (
    cholesky as cholesky,
    det as det,
    eig as eig,
    eigh as eigh,
    eigvals as eigvals,
    eigvalsh as eigvalsh,
    inv as inv,
    matrix_norm as matrix_norm,
    matrix_power as matrix_power,
    matrix_rank as matrix_rank,
    pinv as pinv,
    qr as qr,
    slogdet as slogdet,
    solve as solve,
    svd as svd,
    svdvals as svdvals,
    vector_norm as vector_norm,
)
from stagec_arrays.namespace.linear import (
    cross as cross,
    diagonal as diagonal,
    matmul as matmul,
    matrix_transpose as matrix_transpose,
    outer as outer,
    tensordot as tensordot,
    trace as trace,
    vecdot as vecdot,
)
