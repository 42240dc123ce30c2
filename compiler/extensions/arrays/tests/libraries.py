"""Functions of other libraries that take arrays of any namespace, run untouched through stagec_arrays.numpy.

As a program: prints, for each, whether it gives numpy's values outside a trace and in one, as JSON.
"""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

os.environ["SCIPY_ARRAY_API"] = "1"  # SciPy reads it when it is imported
warnings.simplefilter("ignore")

import array_api_extra as xpx  # noqa: E402
import numpy as np  # noqa: E402
import sklearn  # noqa: E402
from einops import array_api as einops  # noqa: E402
from scipy import fft, integrate, ndimage, optimize, signal, special, stats  # noqa: E402
from scipy.cluster.vq import vq, whiten  # noqa: E402
from scipy.spatial.transform import Rotation  # noqa: E402
from sklearn import decomposition, metrics, preprocessing  # noqa: E402
from sklearn.metrics import pairwise  # noqa: E402
from sklearn.mixture import GaussianMixture  # noqa: E402

import stagec  # noqa: E402
import stagec_arrays  # noqa: E402
import stagec_arrays.numpy as xp  # noqa: E402

RNG = np.random.default_rng(0)
X, Y, V = RNG.normal(size=(5, 4)), RNG.normal(size=(5, 4)), RNG.normal(size=20)
P = RNG.uniform(0.1, 1, size=(5, 4))
P /= P.sum(axis=1, keepdims=True)


def mixtures(x: Any, kind: str) -> Any:
    """Return the covariances of two Gaussians of one kind."""
    model = GaussianMixture(2, covariance_type=kind, init_params="random_from_data", random_state=0)
    return model.fit(x).covariances_


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    # SciPy
    "special.logsumexp": (lambda x: special.logsumexp(x, axis=1), (X,)),
    "special.softmax": (lambda x: special.softmax(x, axis=1), (X,)),
    "special.log_softmax": (lambda x: special.log_softmax(x, axis=1), (X,)),
    "special.rel_entr": (special.rel_entr, (P, P[::-1].copy())),
    "special.xlogy": (special.xlogy, (P, P)),
    "special.expit": (special.expit, (X,)),
    "stats.zscore": (lambda x: stats.zscore(x, axis=0), (X,)),
    "stats.zmap": (lambda x, y: stats.zmap(x, y, axis=0), (X, Y)),
    "stats.skew": (lambda x: stats.skew(x, axis=0), (X,)),
    "stats.kurtosis": (lambda x: stats.kurtosis(x, axis=0), (X,)),
    "stats.gmean": (lambda x: stats.gmean(x, axis=0), (P,)),
    "stats.hmean": (lambda x: stats.hmean(x, axis=0), (P,)),
    "stats.variation": (lambda x: stats.variation(x, axis=0), (P,)),
    "stats.sem": (lambda x: stats.sem(x, axis=0), (X,)),
    "stats.gstd": (lambda x: stats.gstd(x, axis=0), (P,)),
    "stats.circmean": (lambda x: stats.circmean(x, axis=0), (P,)),
    "stats.circvar": (lambda x: stats.circvar(x, axis=0), (P,)),
    "stats.tmean": (stats.tmean, (V,)),
    "stats.boxcox_llf": (lambda x: stats.boxcox_llf(0.5, x), (np.abs(V) + 0.1,)),
    "stats.directional_stats": (lambda x: stats.directional_stats(x).mean_direction, (X,)),
    "stats.entropy": (lambda x: stats.entropy(x, axis=1), (P,)),
    "stats.pearsonr": (lambda x, y: stats.pearsonr(x, y).statistic, (X[:, 0], Y[:, 0])),
    "stats.quantile": (lambda x: stats.quantile(x, 0.3), (V,)),
    "integrate.trapezoid": (lambda x: integrate.trapezoid(x, axis=0), (X,)),
    "integrate.cumulative_trapezoid": (lambda x: integrate.cumulative_trapezoid(x, axis=0), (X,)),
    "integrate.cumulative_simpson": (lambda x: integrate.cumulative_simpson(x, axis=0), (X,)),
    "optimize.rosen": (optimize.rosen, (V,)),
    "optimize.rosen_der": (optimize.rosen_der, (V,)),
    "optimize.rosen_hess": (optimize.rosen_hess, (V,)),
    "optimize.rosen_hess_prod": (optimize.rosen_hess_prod, (V, V)),
    "cluster.vq.whiten": (lambda x: whiten(x, check_finite=False), (X,)),
    "cluster.vq.vq": (lambda x, y: vq(x, y, check_finite=False)[1], (X, Y[:2])),
    "spatial.Rotation": (lambda q, v: Rotation.from_quat(q).apply(v), (X, X[:, :3].copy())),
    "fft.fft": (lambda x: fft.fft(x, axis=0, norm="ortho"), (X,)),
    "fft.irfft": (lambda x: fft.irfft(x, n=5), (X,)),
    "fft.rfftn": (fft.rfftn, (X,)),
    "fft.hfft": (fft.hfft, (X,)),
    "fft.fftshift": (fft.fftshift, (X,)),
    "fft.fht": (lambda x: fft.fht(x, 0.1, 0.5), (V,)),
    "fft.dct": (fft.dct, (X,)),
    "signal.convolve": (signal.convolve, (V, V[:5].copy())),
    "signal.envelope": (signal.envelope, (V,)),
    "signal.fftconvolve": (signal.fftconvolve, (V, V[:5].copy())),
    "signal.freqz": (lambda x: signal.freqz(x, worN=16)[1], (V,)),
    "signal.hilbert": (signal.hilbert, (V,)),
    "signal.hilbert2": (signal.hilbert2, (X,)),
    "signal.oaconvolve": (signal.oaconvolve, (V, V[:5].copy())),
    "signal.resample": (lambda x: signal.resample(x, 30), (V,)),
    "signal.welch": (lambda x: signal.welch(x, nperseg=8)[1], (V,)),
    "ndimage.gaussian_filter": (lambda x: ndimage.gaussian_filter(x, 1.0), (X,)),
    # array-api-extra
    "xpx.at": (lambda x: xpx.at(x, (slice(None), 1)).add(2.0, copy=True), (X,)),
    "xpx.angle": (lambda x: xpx.angle(x + 1j), (X,)),
    "xpx.atleast_nd": (lambda x: xpx.atleast_nd(x, ndim=3), (X,)),
    "xpx.apply_where": (lambda x: xpx.apply_where(x > 0, x, lambda v: v**0.5, fill_value=0.0), (X,)),
    "xpx.cov": (xpx.cov, (X,)),
    "xpx.create_diagonal": (xpx.create_diagonal, (V,)),
    "xpx.isclose": (xpx.isclose, (X, Y)),
    "xpx.kron": (xpx.kron, (X, Y)),
    "xpx.nunique": (xpx.nunique, (X,)),
    "xpx.pad": (lambda x: xpx.pad(x, 2), (X,)),
    "xpx.partition": (lambda x: xpx.partition(x, 3), (V,)),
    "xpx.nanmean": (lambda x: xpx.nanmean(x, axis=0), (X,)),
    "xpx.isin": (lambda x: xpx.isin(x, x[:2]), (V,)),
    "xpx.union1d": (xpx.union1d, (V, V[:3].copy())),
    "xpx.sinc": (xpx.sinc, (X,)),
    "xpx.setdiff1d": (xpx.setdiff1d, (V, V[:3].copy())),
    # einops
    "einops.rearrange": (lambda x: einops.rearrange(x, "a (b c) -> c (a b)", c=2), (X,)),
    "einops.reduce": (lambda x: einops.reduce(x, "a (b c) -> b", "mean", c=2), (X,)),
    "einops.repeat": (lambda x: einops.repeat(x, "a b -> b a r", r=3), (X,)),
    "einops.pack": (lambda x, y: einops.pack([x, y], "a *")[0], (X, Y)),
    # scikit-learn
    "sklearn.GaussianMixture, full": (lambda x: mixtures(x, "full"), (X,)),
    "sklearn.GaussianMixture, tied": (lambda x: mixtures(x, "tied"), (X,)),
    "sklearn.cosine_similarity": (pairwise.cosine_similarity, (X, Y)),
    "sklearn.euclidean_distances": (pairwise.euclidean_distances, (X, Y)),
    "sklearn.linear_kernel": (pairwise.linear_kernel, (X, Y)),
    "sklearn.manhattan_distances": (pairwise.manhattan_distances, (X, Y)),
    "sklearn.PCA": (lambda x: decomposition.PCA(2, svd_solver="full").fit_transform(x), (X,)),
    "sklearn.polynomial_kernel": (pairwise.polynomial_kernel, (X, Y)),
    "sklearn.rbf_kernel": (pairwise.rbf_kernel, (X, Y)),
    "sklearn.sigmoid_kernel": (pairwise.sigmoid_kernel, (X, Y)),
    "sklearn.paired_euclidean_distances": (pairwise.paired_euclidean_distances, (X, Y)),
    "sklearn.PolynomialFeatures": (lambda x: preprocessing.PolynomialFeatures(2).fit_transform(x), (X,)),
    "sklearn.normalize": (preprocessing.normalize, (X,)),
    "sklearn.StandardScaler": (lambda x: preprocessing.StandardScaler().fit_transform(x), (X,)),
    "sklearn.mean_squared_error": (metrics.mean_squared_error, (V, V[::-1].copy())),
}

CANNOT = {
    "special.expit": "SciPy calls its own code in C, on NumPy's arrays",
    "stats.entropy": "it calls special.entr, which SciPy computes in C",
    "stats.hmean": "it asks whether all elements are positive, in Python's if",
    "stats.pearsonr": "its p-value is computed in C",
    "stats.quantile": "it asks whether there are NaNs, in Python's if",
    "cluster.vq.vq": "SciPy calls its own code in C, on NumPy's arrays",
    "fft.dct": "SciPy calls its own code in C, on NumPy's arrays",
    "signal.convolve": "it chooses a method by the largest elements, of which it makes numbers with int()",
    "signal.welch": "SciPy computes it with NumPy, of any namespace's arrays",
    "ndimage.gaussian_filter": "SciPy calls its own code in C, on NumPy's arrays",
    "xpx.union1d": "the shape of the result depends on elements",
    "xpx.setdiff1d": "the shape of the result depends on elements",
    "sklearn.GaussianMixture, full": "it writes to elements of one array through another",
    "sklearn.GaussianMixture, tied": "it asks whether elements are finite, in Python's if",
    "sklearn.StandardScaler": "it asks which features are constant, in Python's if",
    "sklearn.mean_squared_error": "it returns Python's float",
}
"""What cannot be traced, and why. Outside a trace they give numpy's values, all but those of WRITES."""

WRITES = {"sklearn.GaussianMixture, full": "it adds to the diagonal of each covariance through a view"}
"""What raises outside a trace, as it writes to elements of one array through another."""


def main() -> None:
    """Run all."""
    sklearn.set_config(array_api_dispatch=True, assume_finite=True)  # else it asks whether elements are finite
    found = {}
    with stagec_arrays.enable_x64():
        for name, (function, arrays) in FUNCTIONS.items():
            wanted = function(*arrays)
            said = []
            for call in (function, stagec.jit(function, frontend="arrays")):
                try:
                    np.testing.assert_allclose(np.asarray(call(*map(xp.asarray, arrays))), wanted, 1e-9, 1e-11)
                    said.append("")
                except Exception as error:  # noqa: BLE001 - whatever a library raises is the finding
                    if name in sys.argv[1:]:
                        traceback.print_exc()
                    said.append(f"{type(error).__name__}: {error}")
            found[name] = said
    print(json.dumps(found))


if __name__ == "__main__":
    main()
