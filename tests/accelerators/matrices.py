"""A function of `stagec_arrays.numpy`, in terms of solvers of each platform."""

import stagec_arrays.numpy as np


def factorized(x):
    """Singular values, eigenvalues and an inverse."""
    definite = x @ x.mT + np.eye(4)
    return np.linalg.svdvals(x), np.linalg.eigvalsh(definite), np.linalg.cholesky(np.linalg.inv(definite))
