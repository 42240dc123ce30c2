"""A chain of NUTS with BlackJAX, and a step of variational inference with NumPyro, as their pages have them."""

import blackjax
import jax
import jax.numpy as jnp
import jax.random as random
import jax.scipy.stats as stats
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

observed = jnp.linspace(8.0, 12.0, 20)


def logdensity_fn(x):
    logpdf = stats.norm.logpdf(observed, x["loc"], jnp.exp(x["log_scale"]))
    return jnp.sum(logpdf)


def inference_loop(rng_key, initial_state):
    nuts = blackjax.nuts(logdensity_fn, step_size=1e-1, inverse_mass_matrix=jnp.array([0.5, 0.01]))

    def one_step(state, rng_key):
        state, info = nuts.step(rng_key, state)
        return state, (state, info)

    return jax.lax.scan(one_step, initial_state, jax.random.split(rng_key, 5))


def inference_loop_arguments():
    nuts = blackjax.nuts(logdensity_fn, step_size=1e-1, inverse_mass_matrix=jnp.array([0.5, 0.01]))
    return jax.random.key(0), nuts.init({"loc": jnp.array(1.0), "log_scale": jnp.array(1.0)})


def inference_loop_avals():
    return jax.eval_shape(inference_loop_arguments)


def model(data):
    f = numpyro.sample("latent_fairness", dist.Beta(10, 10))
    with numpyro.plate("N", data.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(f), obs=data)


svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(step_size=0.0005), Trace_ELBO())


def svi_update(svi_state, data):
    return svi.update(svi_state, data)


def svi_update_arguments():
    data = jnp.concatenate([jnp.ones(6), jnp.zeros(4)])
    return svi.init(random.PRNGKey(0), data), data


def svi_update_avals():
    return jax.eval_shape(svi_update_arguments)
