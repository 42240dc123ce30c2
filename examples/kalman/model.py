"""A Kalman filter of tracks that are measured with noise, its likelihood, and a step that fits the noise to tracks.

It is written against the Python array API standard: nothing here imports JAX, and the build has none.
"""

import stagec_arrays
import stagec_arrays.lax as lax
import stagec_arrays.numpy as np

LEARNING_RATE = 0.5


def _model(params):
    """Return the transition from one time to the next, its noise, and the variance of a measurement."""
    motion = np.asarray([[1.0, 1.0], [0.0, 1.0]])
    shape = np.asarray([[0.25, 0.5], [0.5, 1.0]])
    return motion, np.exp(params["motion"]) * shape, np.exp(params["sensor"])


def track(params, measured):
    """Follow positions over time: f32[batch,100], and the logarithms of two variances.

    Returns position and velocity at each time (f32[batch,100,2]), and the log-likelihood of each track (f32[batch]).
    """
    motion, motion_noise, sensor_noise = _model(params)

    def step(state, position):
        mean, covariance, likelihood = state
        mean, covariance = mean @ motion.mT, motion @ covariance @ motion.mT + motion_noise
        surprise = position - mean[:, 0]
        variance = covariance[0, 0] + sensor_noise
        gain = covariance[:, 0] / variance
        likelihood = likelihood - 0.5 * (surprise**2 / variance + np.log(2 * np.pi * variance))
        mean = mean + surprise[:, None] * gain
        return (mean, covariance - gain[:, None] * covariance[0], likelihood), mean

    positions = measured.mT
    start = np.zeros((measured.shape[0], 2)), 10.0 * np.eye(2), np.zeros(measured.shape[0])
    (_, _, likelihood), means = lax.scan(step, start, positions)
    return {"mean": np.permute_dims(means, (1, 0, 2)), "log_likelihood": likelihood}


def fit_step(params, measured):
    """Take one step towards the likeliest variances; return them, and the mean log-likelihood before the step."""

    def loss(params):
        return -np.mean(track(params, measured)["log_likelihood"]) / measured.shape[1]

    value, gradient = stagec_arrays.value_and_grad(loss)(params)
    return {name: params[name] - LEARNING_RATE * gradient[name] for name in params}, -value * measured.shape[1]
