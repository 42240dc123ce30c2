"""An ordinary differential equation and the gradient of a neural one, as diffrax's pages have them."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from diffrax import ODETerm, PIDController, SaveAt, Tsit5, diffeqsolve


def lotka_volterra(y0, args):
    def vector_field(t, y, args):
        prey, predator = y
        a, b, c, d = args
        return a * prey - b * prey * predator, -c * predator + d * prey * predator

    return diffeqsolve(
        ODETerm(vector_field),
        Tsit5(),
        t0=0,
        t1=10,
        dt0=0.1,
        y0=y0,
        args=args,
        saveat=SaveAt(ts=jnp.linspace(0, 10, 21)),
        stepsize_controller=PIDController(rtol=1e-5, atol=1e-5),
    )


def lotka_volterra_arguments():
    return (jnp.array(10.0), jnp.array(10.0)), (jnp.array(0.1), jnp.array(0.02), jnp.array(0.4), jnp.array(0.02))


def lotka_volterra_avals():
    return jax.eval_shape(lotka_volterra_arguments)


class Func(eqx.Module):
    out_scale: jax.Array
    mlp: eqx.nn.MLP

    def __init__(self, data_size, width_size, depth, *, key):
        self.out_scale = jnp.array(1.0)
        self.mlp = eqx.nn.MLP(
            data_size, data_size, width_size, depth, activation=jax.nn.softplus, final_activation=jnp.tanh, key=key
        )

    def __call__(self, t, y, args):
        return self.out_scale * self.mlp(y)


class NeuralODE(eqx.Module):
    func: Func

    def __init__(self, data_size, width_size, depth, *, key):
        self.func = Func(data_size, width_size, depth, key=key)

    def __call__(self, ts, y0):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(self.func),
            diffrax.Tsit5(),
            t0=ts[0],
            t1=ts[-1],
            dt0=ts[1] - ts[0],
            y0=y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=ts),
        )
        return solution.ys


@eqx.filter_value_and_grad
def grad_loss(model, ti, yi):
    y_pred = jax.vmap(model, in_axes=(None, 0))(ti, yi[:, 0])
    return jnp.mean((yi - y_pred) ** 2)


optim = optax.adabelief(3e-3)


@eqx.filter_jit
def make_step(ti, yi, model, opt_state):
    loss, grads = grad_loss(model, ti, yi)
    updates, opt_state = optim.update(grads, opt_state)
    model = eqx.apply_updates(model, updates)
    return loss, model, opt_state


def make_step_arguments():
    model = NeuralODE(2, 16, 2, key=jr.key(0))
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    return jnp.linspace(0.0, 1.0, 8), jr.normal(jr.key(1), (4, 8, 2)), model, opt_state


def make_step_avals():
    return eqx.filter_eval_shape(make_step_arguments)
