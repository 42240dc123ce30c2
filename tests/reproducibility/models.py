"""Models that compute while they are imported or traced: name -> the source of what their program has as constants.

One line each for what follows a machine: kernels of XLA, of YNNPACK and of Eigen, LAPACK, numpy's and SciPy's own. The
arrays are as large as they must be for another CPU, another cache or other cores to show: see `HEAD`.
"""

HEAD = """\
import functools, math

import jax, jax.numpy as jnp, numpy as np
from jax import lax

R = np.random.default_rng(0)
N = R.normal(size=(300, 300))
N32 = N.astype(np.float32)
A = jnp.asarray(N)
KEY = jax.random.key(0)


def array(*shape):
    return jnp.asarray(R.normal(size=shape), jnp.float32)


def convolve(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loss(w):
    return ((jnp.tanh(A @ w) - A) ** 2).mean()
"""
TAIL = """


def f(x):
    return x, TABLE
"""
X64 = frozenset({"matmul_x64", "convolution_x64", "eigh_x64", "solve_x64", "fft_x64", "normal_x64", "complex_x64"})
"""Those that are traced with `enable_x64`."""
MODELS = {
    "table": "jnp.tanh(A @ A)",
    "weights": "jax.random.truncated_normal(KEY, -2, 2, (64, 64)) / 8",
    "orthogonal": "jax.nn.initializers.orthogonal()(KEY, (64, 64))",
    "gamma": "jax.random.gamma(KEY, 2.0, (100,))",
    "trained": "functools.reduce(lambda w, _: w - 0.1 * jax.grad(loss)(w), range(5), A / 16)",
    "trained_in_a_loop": "lax.fori_loop(0, 5, lambda _, w: w - 0.1 * jax.grad(loss)(w), A / 16)",
    "softmax": "jax.nn.softmax(A @ A.T / 4)",
    "long_sum": "(lambda x: (x.sum(), x.mean(), x.var(), jnp.cumsum(x)[-8:]))(array(1 << 18))",
    "recurrent": "lax.scan(lambda h, row: (jnp.tanh(h @ A / 16 + row), h.sum()), A[0], A)",
    "convolution": "convolve(array(2, 24, 24, 8), array(3, 3, 8, 16))",
    "convolution_grad": "jax.grad(lambda k: convolve(array(2, 24, 24, 8), k).sum())(array(3, 3, 8, 16))",
    "batched": "jnp.einsum('bij,bjk->bik', array(8, 32, 48), array(8, 48, 32))",
    "half_precision": "[a @ a for a in (A.astype(jnp.bfloat16), A.astype(jnp.float16))]",
    "complex": "(A + 1j * A.T) @ jnp.exp(1j * A)",
    "eigh": "jnp.linalg.eigh(A + A.T)",
    "svd": "jnp.linalg.svd(A)",
    "qr": "jnp.linalg.qr(A)",
    "solve": "(jnp.linalg.inv(A), jnp.linalg.cholesky(A @ A.T + 300 * jnp.eye(300)))",
    "expm": "jax.scipy.linalg.expm(A / 16)",
    "fft": "jnp.fft.fft2(A)",
    "special": "(jax.scipy.special.gammaln(jnp.abs(A) + 1), lax.erf(A), jnp.sin(50 * A))",
    "matmul_x64": "jnp.tanh(A @ A)",
    "convolution_x64": "convolve(array(2, 24, 24, 8).astype(float), array(3, 3, 8, 16).astype(float))",
    "eigh_x64": "jnp.linalg.eigh(A + A.T)",
    "solve_x64": "jnp.linalg.solve(A, A[0])",
    "fft_x64": "jnp.fft.fft(A)",
    "normal_x64": "jax.random.normal(KEY, (64, 64))",
    "complex_x64": "(A + 1j * A.T) @ (A - 1j * A)",
    "numpy_product": "(np.float32(N @ N), N32 @ N32, N32.ravel() @ N32.ravel())",
    "numpy_functions": "[np.float32(g(N)) for g in (np.exp, np.sin, np.tanh)] + [np.exp(N32), np.tanh(N32)]",
    "numpy_sums": "(N32.sum(), N32.mean(0), N32.var())",
    "numpy_linalg": "[np.float32(part) for part in (*np.linalg.eigh(N + N.T), *np.linalg.svd(N), np.linalg.inv(N))]",
    "numpy_fft": "np.complex64(np.fft.fft(N))",
    "scipy_linalg": "np.float32(__import__('scipy.linalg').linalg.expm(N / 16))",
    "scipy_functions": "[np.float32(__import__('scipy.special').special.erf(N)), __import__('scipy.fft').fft.dct(N32)]",
    "python": "np.array([math.sin(i) + math.exp(i / 100) + math.pow(i, 1.7) for i in range(1, 500)], np.float32)",
}


def source(name: str) -> str:
    """Return the module of a model."""
    return f"{HEAD}\nTABLE = {MODELS[name]}{TAIL}"
