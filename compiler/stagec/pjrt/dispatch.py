"""jaxlib's own way from host arrays to results, in C++: `jax.jit` calls this `pjit`.

It converts all arrays of a call at once; from Python each is a separate object and call (`batched_device_put`).
Arguments are checked first. If `pjit` would behave differently from the Python path, stagec uses Python.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from jaxlib import _jax

from stagec.pjrt import clients

if TYPE_CHECKING:
    from stagec.pjrt.executable import Executable

Call: TypeAlias = Callable[..., list[_jax.ArrayImpl]]
"""Takes the parameters of an executable, buffers and numpy arrays, and gives the buffers of its results."""

_CONVERTED = {"int64", "uint64", "float64", "complex128"}
"""Types that `pjit` silently converts to 32 bits if JAX's setting `jax_enable_x64` is off."""

_LISTS = _jax.pytree.PyTreeRegistry()


class FastPath(NamedTuple):
    """What `pjit` remembers of a call; fields as in `MeshExecutableFastpathData` of jax/_src/interpreters/pxla.py."""

    xla_executable: _jax.LoadedExecutable
    out_pytree_def: Any
    in_shardings: Sequence[Any]
    out_shardings: Sequence[Any]
    out_avals: Sequence[Any]
    out_committed: Sequence[bool]
    kept_var_bitvec: Sequence[bool]
    in_device_local_layouts: Sequence[None]
    const_args: Sequence[Any]


def dispatching(executable: Executable, hosted: Sequence[int], slow: Call) -> Call | None:
    """Return a faster equivalent of `slow`; None if there is none.

    hosted: which parameters are numpy arrays, none of which may be donated; the others are buffers that lie as the
    executable wants them. slow: must not refer to what is returned here, or nothing would free it but a collection; it
    runs when JAX's settings changed since the last call (`jax.disable_jit`): `pjit` remembers calls by them.

    What is returned raises ValueError if XLA has an error, and `slow` RuntimeError.
    """
    if not takes(executable, hosted):
        return None
    count, results = len(executable.parameters), executable.results
    kept = [True] * count
    path = fast_path(executable, kept, results, [own.xla for own in executable.output_shardings], True)

    def miss(*buffers: Any) -> tuple[list[_jax.ArrayImpl], FastPath]:
        return slow(*buffers), path

    return remembering(slow, miss)  # type: ignore[no-any-return]


def takes(executable: Executable, hosted: Sequence[int]) -> bool:
    """Whether `pjit` can replace the way through Python for an executable. hosted: as for `dispatching`."""
    # Several devices of a CPU run one call at a time. On an accelerator numpy's memory would be read after the call.
    is_cpu = clients.platform_of(executable.devices[0]) == "cpu"
    if len(executable.devices) > 1 or (hosted and not is_cpu):
        return False
    taken = [executable.parameters[number] for number in hosted]
    special = any(aval.dtype.name in _CONVERTED or aval.sharding.memory_kind or aval.layout for aval in taken)
    return not special and _may_be_used()


def fast_path(
    executable: Executable,
    kept: Sequence[bool],
    avals: Sequence[Any],
    shardings: Sequence[Any],
    committed: bool,
    structure: Any = None,
) -> FastPath:
    """Return the data for `pjit` to remember a call.

    kept: for each leaf of the arguments, whether it is a parameter. avals, shardings, committed: of the leaves of the
    result. structure: jaxlib's PyTreeDef of the result; None: of the list of its leaves.
    """
    count = len(executable.parameters)
    return FastPath(
        executable.loaded,
        _LISTS.flatten([0] * len(avals))[1] if structure is None else structure,
        [sharding.xla for sharding in executable.parameter_shardings],
        shardings,
        avals,
        [committed] * len(avals),
        kept,
        [None] * count,
        (),
    )


def remembering(
    slow: Callable[..., Any], miss: Callable[..., tuple[Any, FastPath | None]], registry: Any = None
) -> Any:
    """Return `pjit` with the calls that it remembers.

    slow: runs a call if JAX's setting `jax_disable_jit` is on. miss: runs a call that `pjit` does not remember, and
    says what it is to remember of it. registry: takes arguments apart; None: they are leaves.
    """
    cache = _jax.PjitFunctionCache(64)
    return _jax.pjit("stagec", slow, miss, [], [], (), registry or _LISTS, _never_called, cache)


def _never_called(*arguments: Any) -> None:
    raise AssertionError(f"pjit asks how to place what was prepared: {arguments}")


def _may_be_used() -> bool:
    """Return whether the settings are there that `pjit` reads. They are JAX's, and set here in a process without it."""
    if "jax" in sys.modules:
        return hasattr(sys.modules["jax"], "jit")  # it may be in the middle of its import, in another thread
    return _set_once()


@functools.cache
def _set_once() -> bool:
    """Set them to JAX's defaults; JAX sets its own when it is imported later."""
    jit, setting = _jax.jax_jit, _jax.config.Config
    jit.set_disable_jit_state(setting("stagec_disable_jit", False))
    jit.set_enable_x64_state(setting("stagec_enable_x64", False))
    jit.set_post_hook_state(setting("stagec_post_hook", None))
    return True
