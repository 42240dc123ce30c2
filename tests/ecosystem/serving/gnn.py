"""A graph network on a jraph.GraphsTuple, as Jraph's page has it, with Haiku's layers."""

import haiku as hk
import jax
import jax.numpy as jnp
import jraph


@jraph.concatenated_args
def update(features):
    return hk.nets.MLP([16, 8])(features)


def net_fn(graph):
    net = jraph.GraphNetwork(update_edge_fn=update, update_node_fn=update, update_global_fn=update)
    return net(graph)


network = hk.without_apply_rng(hk.transform(net_fn))


def predict(params, graph):
    return network.apply(params, graph)


def arguments():
    graph = jraph.GraphsTuple(
        nodes=jax.random.normal(jax.random.key(0), (5, 4)),
        edges=jax.random.normal(jax.random.key(1), (7, 3)),
        senders=jnp.array([0, 1, 2, 3, 4, 0, 2]),
        receivers=jnp.array([1, 2, 3, 4, 0, 2, 4]),
        n_node=jnp.array([3, 2]),
        n_edge=jnp.array([4, 3]),
        globals=jnp.ones((2, 2)),
    )
    return network.init(jax.random.key(2), graph), graph


def avals():
    return jax.eval_shape(arguments)
