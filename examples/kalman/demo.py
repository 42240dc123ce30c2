"""Fit a Kalman filter to noisy tracks and follow them, with what was built where JAX is not installed."""

import importlib.util
import sys

import numpy as np

import stagec

STEPS = 400


def main(path: str) -> None:
    """Load the bundle at `path`, fit, track, and print what happened."""
    if importlib.util.find_spec("jax") is not None:
        sys.exit("jax is importable here: this demonstration is about building and running without it")
    bundle = stagec.load(path, policy="executable_only")
    truth, measured = tracks()
    params = {"motion": np.float32(0), "sensor": np.float32(0)}
    _, before = bundle["fit_step"](params, measured)
    state = stagec.device_put(params)
    for _ in range(STEPS):
        state, likelihood = bundle["fit_step"](state, measured)
    fitted = {name: value.numpy() for name, value in state.items()}
    tracked = bundle["track"](fitted, measured)
    sensor, filtered = (error(positions, truth) for positions in (measured, tracked["mean"][..., 0]))
    print(f"bundle      {bundle.name} {bundle.version}, running its target {bundle.target!r}; jax is not importable")
    print(f"fit         {STEPS} steps, log-likelihood of a track from {float(before):.1f} to {float(likelihood):.1f}")
    deviations = (f"{name} {np.exp(value / 2):.2f}" for name, value in sorted(fitted.items()))
    print(f"noise       {', '.join(deviations)} (they are 0.10 and 2.00)")
    print(f"error       of the sensor {sensor:.2f}, of the filter {filtered:.2f}")
    if not (filtered < 0.6 * sensor and likelihood > before):
        sys.exit("the filter is not better than the sensor")


def tracks() -> tuple[np.ndarray, np.ndarray]:
    """Return 16 tracks of 100 positions, and what a noisy sensor measures of them."""
    rng = np.random.default_rng(0)
    velocity = np.cumsum(rng.normal(scale=0.1, size=(16, 100)), axis=1)
    truth = np.cumsum(velocity, axis=1)
    return truth, (truth + rng.normal(scale=2, size=truth.shape)).astype(np.float32)


def error(positions: np.ndarray, truth: np.ndarray) -> float:
    """Return the root of the mean square of the errors, without the first ten positions."""
    return float(np.sqrt(np.mean((positions - truth)[:, 10:] ** 2)))


if __name__ == "__main__":
    main(sys.argv[1])
