"""A sampler of a score-based diffusion model, as Equinox's example has it."""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class MixerBlock(eqx.Module):
    patch_mixer: eqx.nn.MLP
    hidden_mixer: eqx.nn.MLP
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm

    def __init__(self, num_patches, hidden_size, *, key):
        tkey, ckey = jr.split(key, 2)
        self.patch_mixer = eqx.nn.MLP(num_patches, num_patches, 16, depth=1, key=tkey)
        self.hidden_mixer = eqx.nn.MLP(hidden_size, hidden_size, 16, depth=1, key=ckey)
        self.norm1 = eqx.nn.LayerNorm((hidden_size, num_patches))
        self.norm2 = eqx.nn.LayerNorm((num_patches, hidden_size))

    def __call__(self, y):
        y = y + jax.vmap(self.patch_mixer)(self.norm1(y))
        y = y.T
        y = y + jax.vmap(self.hidden_mixer)(self.norm2(y))
        return y.T


class Mixer2d(eqx.Module):
    conv_in: eqx.nn.Conv2d
    conv_out: eqx.nn.ConvTranspose2d
    blocks: list
    norm: eqx.nn.LayerNorm
    t1: float

    def __init__(self, img_size, patch_size, hidden_size, num_blocks, t1, *, key):
        channels, height, width = img_size
        num_patches = (height // patch_size) * (width // patch_size)
        inkey, outkey, *bkeys = jr.split(key, 2 + num_blocks)
        self.conv_in = eqx.nn.Conv2d(channels + 1, hidden_size, patch_size, stride=patch_size, key=inkey)
        self.conv_out = eqx.nn.ConvTranspose2d(hidden_size, channels, patch_size, stride=patch_size, key=outkey)
        self.blocks = [MixerBlock(num_patches, hidden_size, key=bkey) for bkey in bkeys]
        self.norm = eqx.nn.LayerNorm((hidden_size, height // patch_size, width // patch_size))
        self.t1 = t1

    def __call__(self, t, y, *, key=None):
        t = jnp.broadcast_to(jnp.array(t / self.t1), (1, *y.shape[1:]))
        y = self.conv_in(jnp.concatenate([y, t]))
        _, height, width = y.shape
        y = y.reshape(y.shape[0], -1)
        for block in self.blocks:
            y = block(y)
        y = self.norm(y.reshape(-1, height, width))
        return self.conv_out(y)


def int_beta(t):
    return t


@eqx.filter_jit
def single_sample_fn(model, key):
    def drift(t, y, args):
        _, beta = jax.jvp(int_beta, (t,), (jnp.ones_like(t),))
        return -0.5 * beta * (y + model(t, y))

    solver = dfx.Tsit5()
    y1 = jr.normal(key, (1, 8, 8))
    solution = dfx.diffeqsolve(dfx.ODETerm(drift), solver, 10.0, 0.0, -1.0, y1, adjoint=dfx.ForwardMode())
    return solution.ys[0]


def arguments():
    return Mixer2d((1, 8, 8), 4, 8, 2, 10.0, key=jr.key(0)), jr.key(1)


def avals():
    return eqx.filter_eval_shape(arguments)
