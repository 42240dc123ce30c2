"""The functions that are built: as many as one likes, of mixed sizes, each in its own file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LAYERS = '''"""Layers that the functions share."""

import jax
import jax.numpy as jnp


def dense(w, x):
    return jax.nn.gelu(x @ w["kernel"] + w["bias"])


def mlp(w, x, depth):
    for _ in range(depth):
        x = x + dense(w, x)
    return x


def recurrent(w, x, depth):
    for _ in range(depth):
        x, _ = jax.lax.scan(lambda carry, _: (jnp.tanh(dense(w, carry)), None), x, None, length=16)
    return x


def normalized(w, x, depth):
    for _ in range(depth):
        x = dense(w, (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6))
    return jax.nn.softmax(x)


def transformer(w, x, depth):
    for _ in range(depth):
        query, key, value = (x @ (w["kernel"] * scale) for scale in (1.0, 0.5, 2.0))
        x = x + jax.nn.softmax(query @ key.T) @ value
        x = normalized(w, x, 1) + dense(w, x)
    return x


def training_step(w, x, depth):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.square(transformer(w, x, depth))))(w)
    return loss, jax.tree.map(lambda value, slope: value - 0.1 * slope, w, gradient)
'''

_FUNCTION = '''"""One function."""

from models import layers


def {name}(w, x):
    return layers.{layer}(w, x, {depth}) * {factor}
'''

_OF_EITHER = '''"""One function."""

import {namespace} as n
from models import array_functions


def {name}(w, x):
    return array_functions.small(n, {depth}, w, x)
'''

_TRAINING = _FUNCTION.replace(" * {factor}", "")

_KINDS = ("mlp", "recurrent", "normalized", "transformer", "training_step")
_LARGEST = 40
"""Layers of the training step that XLA takes 3 s for, on two cores."""


@dataclass(frozen=True)
class Function:
    """A function of two arguments, weights and x.

    name: of the function, and of its module in `models`. layer, depth: a shared layer, and how many of it.
    width: of the weights and of x, which no two functions have alike.
    frontend: "jax" or "arrays"; None: JAX's, of the shared layers.
    """

    name: str
    layer: str
    depth: int
    width: int
    frontend: str | None = None

    @property
    def source(self) -> str:
        """The text of its module."""
        if self.frontend:
            namespace = {"jax": "jax.numpy", "arrays": "stagec_arrays.numpy"}[self.frontend]
            return _OF_EITHER.format(name=self.name, namespace=namespace, depth=self.depth)
        text = _TRAINING if self.layer == "training_step" else _FUNCTION
        return text.format(name=self.name, layer=self.layer, depth=self.depth, factor=1.0 + self.width / 1024)

    @property
    def args(self) -> list[Any]:
        """The avals of its arguments, as a manifest has them."""
        return [{"kernel": f"f32[{self.width},{self.width}]", "bias": f"f32[{self.width}]"}, f"f32[16,{self.width}]"]


def mixed(count: int) -> list[Function]:
    """Return functions of mixed sizes: most have a layer or two, a tenth several, and one takes XLA some seconds."""
    functions = []
    for number in range(count - 1):
        depth = 4 if number % 10 == 9 else 1 + number % 2
        functions.append(Function(f"f{number:03}", _KINDS[number // 2 % len(_KINDS)], depth, 32 + number))
    return [*functions, Function(f"f{count - 1:03}", "training_step", min(_LARGEST, count), 256)]


def alike(count: int) -> list[Function]:
    """Return functions of eight small layers each: XLA takes a quarter of a second for one, on two cores."""
    return [Function(f"f{number:03}", "normalized", 8, 32 + number) for number in range(count)]


def small(count: int) -> list[Function]:
    """Return functions of one layer each."""
    return [Function(f"f{number:04}", "mlp", 1, 16 + number) for number in range(count)]


def of_frontend(count: int, frontend: str) -> list[Function]:
    """Return the small functions of array_functions.py, of JAX's ("jax") or of stagec's own frontend ("arrays")."""
    return [Function(f"f{number:03}", "small", number, 8 + number, frontend) for number in range(count)]


def write(
    functions: list[Function],
    targets: Mapping[str, str],
    root: Path,
    jaxlib: Sequence[str] = (),
    runs_on: Sequence[str] = (),
) -> None:
    """Write the package `models` of a Bazel workspace: functions, manifest, BUILD; and avals.json for a plain script.

    targets: the instruction set of each by its name. jaxlib: releases that compile; none: the build's own. runs_on:
    those that run what another compiled.
    """
    package = root / "models"
    package.mkdir(parents=True, exist_ok=True)
    (package / "layers.py").write_text(_LAYERS)
    shutil.copy(Path(__file__).with_name("array_functions.py"), package)
    manifest = ["[manifest]", 'name = "models"', 'version = "1.0.0"']
    manifest += [
        f"{key} = {json.dumps([*named])}" for key, named in (("jaxlib", jaxlib), ("runs_on", runs_on)) if named
    ]
    for target, isa in targets.items():
        manifest += [f"[targets.{target}]", 'platform = "cpu"', f'isa = "{isa}"']
    for function in functions:
        (package / f"{function.name}.py").write_text(function.source)
        weights, x = function.args
        args = "{ " + ", ".join(f'{name} = "{aval}"' for name, aval in weights.items()) + f' }}, "{x}"'
        manifest += [f"[functions.{function.name}]", f'entry = "models.{function.name}:{function.name}"']
        manifest += [f"args = [{args}]", f"targets = {json.dumps([*targets])}"]
        manifest += [f'frontend = "{function.frontend}"'] if function.frontend else []
    (package / "models.toml").write_text("\n".join(manifest) + "\n")
    own = "".join(f'        "{function.name}": ["{function.name}.py"],\n' for function in functions)
    (package / "BUILD").write_text(
        'load("@models_manifest//:defs.bzl", "aot_manifest")\n\n'
        'aot_manifest(\n    name = "models",\n    deps = ["array_functions.py", "layers.py"],\n'
        f"    function_deps = {{\n{own}    }},\n)\n"
    )
    (root / "avals.json").write_text(json.dumps({function.name: function.args for function in functions}))
