"""Sample a regression's posterior with BlackJAX: window adaptation, then NUTS."""

import blackjax
import jax
import jax.numpy as jnp
import numpy as np

observed = np.random.default_rng(0).normal(3, 2, 200)


def logdensity(x):
    scale = jnp.exp(x["log_scale"])
    return jnp.sum(jax.scipy.stats.norm.logpdf(observed, x["loc"], scale)) - x["log_scale"] ** 2


def loop(key, kernel, state, count):
    @jax.jit
    def one(state, key):
        state, _ = kernel(key, state)
        return state, state

    return jax.lax.scan(one, state, jax.random.split(key, count))[1]


key = jax.random.key(0)
key, warm, run = jax.random.split(key, 3)
adapt = blackjax.window_adaptation(blackjax.nuts, logdensity)
(state, parameters), _ = adapt.run(warm, {"loc": 1.0, "log_scale": 0.0}, num_steps=50)
kernel = blackjax.nuts(logdensity, **parameters).step
states = loop(run, kernel, state, 100)
loc = states.position["loc"]
print("loc", float(loc.mean()), "scale", float(jnp.exp(states.position["log_scale"]).mean()), loc.shape)
