"""A penzai model with named axes, taken and returned as its page has it."""

import jax
from penzai import pz
from penzai.models import simple_mlp


def predict(model, features):
    return model(features)


def arguments():
    model = simple_mlp.MLP.from_config(name="mlp", init_base_rng=jax.random.key(0), feature_sizes=[4, 16, 3])
    model = pz.freeze_params(model)
    features = pz.nx.wrap(jax.random.normal(jax.random.key(1), (8, 4)), "batch", "features")
    return model, features


def avals():
    return jax.eval_shape(arguments)
