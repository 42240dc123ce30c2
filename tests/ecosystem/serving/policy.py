"""A step of an actor with Haiku's state and a distribution of distrax, as an example of RL with both has it."""

from typing import NamedTuple

import distrax
import haiku as hk
import jax


class ActorOutput(NamedTuple):
    policy: distrax.Distribution
    value: jax.Array


def forward(observation, is_training):
    x = hk.Flatten()(observation)
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.99)(x, is_training)
    core = hk.GRU(16)
    x, hidden = core(x, core.initial_state(x.shape[0]))
    hk.set_state("hidden", hidden)
    loc = hk.Linear(2)(x)
    scale = jax.nn.softplus(hk.Linear(2)(x))
    value = hk.Linear(1)(x)[..., 0]
    normal = distrax.Independent(distrax.Normal(loc, scale), reinterpreted_batch_ndims=1)
    return ActorOutput(distrax.Transformed(normal, distrax.Block(distrax.Tanh(), 1)), value)


network = hk.transform_with_state(forward)


def act(params, state, key, observation):
    output, state = network.apply(params, state, key, observation, True)
    action, log_prob = output.policy.sample_and_log_prob(seed=key)
    return action, log_prob, output, state


def arguments():
    observation = jax.random.normal(jax.random.key(1), (4, 3, 2))
    params, state = network.init(jax.random.key(0), observation, True)
    return params, state, jax.random.key(2), observation


def avals():
    return jax.eval_shape(arguments)
