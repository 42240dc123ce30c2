"""A first export of a process that forks for the others, so that no fork is the first to do anything.

JAX and MLIR fill tables at the first use, and Python runs code faster the second time; forks share that memory. Without
it a small export takes 235 ms of CPU time in a fork, and 203 with it; a first export takes 90. One of a larger program,
with a loop and a gradient, takes 260 and saves as much. An export makes a client, whose threads no fork would have:
here JAX believes that there is one. Nothing that it traced is kept.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax._src import xla_bridge

from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.errors import StagecError
from stagec.frontends.common import patched
from stagec.frontends.jax import export as frontend

_SPEC = FunctionSpec(
    name="a program of stagec's",  # as no function of a manifest is called
    manifest="",
    entry=f"{__name__}:program",
    args=[{"kernel": "f32[4,4]", "bias": "f32[4]"}, "f32[2,4]"],
    kwargs={},
    avals=None,
    platforms=["cpu"],
    constraints=[],
    static={},
    donate_argnums=[],
    donate_argnames=[],
    keep_unused=False,
    inline=False,
    enable_x64=False,
    vjp_order=0,
    mesh=[["axis", 1]],  # over a mesh, JAX lowers without devices
)


def program(params: Mapping[str, Any], x: jax.Array) -> jax.Array:
    """Run a layer, as most models do."""
    return jax.nn.softmax(jax.nn.gelu(x @ params["kernel"] + params["bias"]))


def warm() -> bool:
    """Export `program`, as an action does; return whether that was possible. It starts no thread.

    A release of JAX that asks more of a client lets forks begin cold, as they did without this.
    """
    with contextlib.suppress(StagecError, AttributeError), _without_a_client():
        frontend.export(_SPEC, [])
        others = {entry.value for entry in importlib.metadata.entry_points(group="jax_plugins")} - {"stagec.jax_plugin"}
        if not others and not importlib.util.find_spec("jax_plugins"):
            # It finds none, and no fork looks: of 120 packages that takes 15 ms.
            xla_bridge._discover_and_register_pjrt_plugins()
        return True
    return False


class _Client:
    """The part of a client that JAX uses to lower over a mesh."""

    platform = "cpu"
    serialize_with_sdy = True


class _Device:
    client = _Client()


@contextlib.contextmanager
def _without_a_client() -> Iterator[None]:
    """Make JAX lower over a mesh without starting a thread, inside a `with` statement; then clear its caches."""

    def in_one_thread(before: Callable[[], Any]) -> Any:
        context = before()
        context.enable_multithreading(False)
        return context

    with contextlib.ExitStack() as changes:
        changes.callback(jax.clear_caches)
        changes.enter_context(patched.DEFAULT_DEVICE_OF_ALL.by(lambda before: _Device))
        changes.enter_context(patched.CLIENT.by(lambda before, *_: _Device.client))
        changes.enter_context(patched.CONTEXT.by(in_one_thread))
        yield
