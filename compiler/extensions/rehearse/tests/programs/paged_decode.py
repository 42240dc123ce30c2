"""Serve two requests with a paged cache of keys and values, as a server of language models does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, WIDTH, HEADS, PAGE, PAGES, LONGEST = 128, 64, 4, 16, 32, 8


def init(key, layers=2):
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    params = {"embed": jax.random.normal(key, (VOCABULARY, WIDTH)) * 0.02, "layers": []}
    for number in range(layers):
        keys = jax.random.split(jax.random.fold_in(key, number), len(shapes))
        rows = zip(shapes.items(), keys)
        params["layers"].append({name: jax.random.normal(k, shape) / WIDTH**0.5 for (name, shape), k in rows})
    return params


@partial(jax.jit, donate_argnums=(1,))
def forward(params, pages, tokens, positions, tables):
    """Return the logits of the last token of each request. tokens: [requests, length]."""
    x = params["embed"][tokens]
    held = []
    for layer, (keys, values) in zip(params["layers"], pages):
        q, k, v = ((x @ layer[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
        page = jnp.take_along_axis(tables, positions // PAGE, axis=1)
        keys = keys.at[page, positions % PAGE].set(k)
        values = values.at[page, positions % PAGE].set(v)
        held.append((keys, values))
        k, v = (each[tables].reshape(len(tokens), -1, HEADS, WIDTH // HEADS) for each in (keys, values))
        scores = jnp.einsum("blhd,bshd->bhls", q, k) / (WIDTH // HEADS) ** 0.5
        mask = jnp.arange(k.shape[1])[None, None] <= positions[..., None]
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e9), axis=-1)
        x = x + jnp.einsum("bhls,bshd->blhd", weights, v).reshape(x.shape) @ layer["o"]
    return x[:, -1] @ params["embed"].T, held


@jax.jit
def sample(key, logits, temperature):
    return jax.random.categorical(key, logits / temperature, axis=-1)


params = init(jax.random.key(0))
shape = (PAGES, PAGE, HEADS, WIDTH // HEADS)
pages = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in params["layers"]]
free = list(range(PAGES))
key = jax.random.key(1)
for length in (5, 12):  # two batches of prompts, padded to a power of two
    padded = 1 << (length - 1).bit_length()
    prompt = np.random.default_rng(length).integers(0, VOCABULARY, (2, padded))
    tables = np.array([[free.pop() for _ in range(LONGEST)] for _ in range(2)])
    positions = jnp.broadcast_to(jnp.arange(padded), prompt.shape)
    logits, pages = forward(params, pages, jnp.asarray(prompt), positions, jnp.asarray(tables))
    done = jnp.zeros(2, bool)
    said = []
    for position in range(padded, padded + 4):
        key, now = jax.random.split(key)
        token = jnp.where(done, 0, sample(now, logits, 0.8))
        done |= token == 1
        said.append(np.asarray(token))
        at = jnp.full((2, 1), position)
        logits, pages = forward(params, pages, token[:, None], at, jnp.asarray(tables))
    print("tokens", np.stack(said, 1).tolist())
    free.extend(tables.ravel().tolist())
