"""Train the tiny model on a text and let it write, from its bundle, in a process that cannot import jax."""

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import stagec

STEPS, SEQUENCES, POSITIONS, CONTEXT = 250, 16, 64, 128
PIECES = (16, 4)
"""The lengths that prefill was built for."""


def main(path: str, text: str) -> None:
    """Load the bundle at `path`, train on the file `text`, write two continuations, and print what happened."""
    if importlib.util.find_spec("jax") is not None:
        sys.exit("jax is importable here: this demonstration is about running without it")
    bundle = stagec.load(path)
    tokens = np.frombuffer(Path(text).read_bytes(), np.uint8).astype(np.int32)
    devices = bundle["train_step"].descriptions[0].nr_devices
    print(f"bundle      {bundle.name} {bundle.version}, target {bundle.target!r} on {devices} devices of this CPU")

    begin = time.perf_counter()
    state, first, last = train(bundle, tokens)
    print(f"training    {STEPS} steps in {time.perf_counter() - begin:.1f} s, loss from {first:.2f} to {last:.2f}")

    begin = time.perf_counter()
    for line in write(bundle, to_numpy(state["params"]), ["Licensed under the Apa", "Unless required by app"]):
        print(f"writing     {line!r}")
    print(f"            in {time.perf_counter() - begin:.1f} s")
    if not last < 2 < first:
        sys.exit("the loss has not come down to 2")


def train(bundle: stagec.Bundle, tokens: np.ndarray) -> tuple[Any, float, float]:
    """Train on random pieces of the text; return the state, on the devices, and the first and the last loss."""
    rng = np.random.default_rng(0)
    state, losses = stagec.device_put(bundle["init"](np.uint32(0))), []
    for step in range(STEPS):
        starts = rng.integers(len(tokens) - POSITIONS, size=(SEQUENCES, 1))
        rate = np.float32(0.003 * (1 - step / STEPS))
        state, loss = bundle["train_step"](state, tokens[starts + np.arange(POSITIONS)], rate)
        losses.append(loss)
    return state, float(losses[0]), float(losses[-1])


def write(bundle: stagec.Bundle, params: Any, prompts: list[str]) -> list[str]:
    """Return each prompt with the characters that the model finds likeliest, until the context is full.

    The prompts, of equal length, are read in pieces of the lengths that prefill was built for, and the rest by decode.
    """
    params, cache = stagec.device_put(params), stagec.device_put(empty_cache(bundle))
    tokens = np.array([list(prompt.encode()) for prompt in prompts], np.int32)
    at, length, logits = 0, tokens.shape[1], None
    while at < CONTEXT:
        piece = next((size for size in PIECES if at + size <= length), 1)
        if at >= length:
            tokens = np.concatenate([tokens, np.argmax(logits.numpy(), axis=1)[:, None].astype(np.int32)], axis=1)
        if piece == 1:
            logits, cache = bundle["decode"](params, cache, tokens[:, at])
        else:
            logits, cache = bundle["prefill"](params, cache, tokens[:, at : at + piece])
        at += piece
    return [bytes(line.astype(np.uint8)).decode("ascii", "replace") for line in tokens]


def empty_cache(bundle: stagec.Bundle) -> Any:
    """Return a cache of nothing, of the shape that decode takes."""
    description = bundle["decode"].descriptions[0]
    avals = [aval for aval in description.in_avals if aval.dtype == "bf16"]
    keys, values = (np.zeros(tuple(map(int, aval.shape)), ml_dtypes.bfloat16) for aval in avals)
    return {"keys": keys, "values": values, "length": np.int32(0)}


def to_numpy(tree: Any) -> Any:
    """Return the tree with its device arrays as numpy arrays."""
    return {key: to_numpy(value) for key, value in tree.items()} if isinstance(tree, dict) else tree.numpy()


if __name__ == "__main__":
    main(*sys.argv[1:])
