"""What stagec changes of JAX's and Python's while it traces: for how long, and for which threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax._src.interpreters import mlir

import stagec
from stagec.frontends.common import patched
from stagec.frontends.common.patched import PATCHES

OWNER = f"{__name__}:Owner"


class Owner:
    """Has a method that tests replace."""

    def name(self) -> str:
        return "before"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.owner}.{patch.name}")
def test_each_patch_names_an_attribute_that_is_there_and_says_why(patch: patched.Patch) -> None:
    assert callable(getattr(patch.object, patch.name))
    assert patch.why
    assert bool(patch.until) == (patch.owner.startswith("jax") and patch not in patched.CALLBACKS)


def test_a_lowering_rule_cannot_stand_in_for_a_dropped_callback() -> None:
    """`jax.export` takes rules for primitives. With them a callback is lowered to nothing, and its effects stay."""
    rules = tuple((patch.object, lambda *_, **__: []) for patch in patched.CALLBACKS)

    def exported(function: Callable[[Any], Any]) -> jax.export.Exported:
        return jax.export.export(jax.jit(function), _override_lowering_rules=rules)(jnp.ones(3))

    def prints(x: Any, ordered: bool = False) -> Any:
        jax.debug.print("{}", x, ordered=ordered)
        return x + 1

    assert exported(prints).unordered_effects
    assert not exported(lambda x: x + 1).unordered_effects
    with pytest.raises(ValueError, match="needs to set `tokens_out`"):
        exported(lambda x: prints(x, ordered=True))


def test_threads_that_lower_at_once_leave_jax_as_it_was() -> None:
    before = {id(patch): getattr(patch.object, patch.name) for patch in PATCHES}
    assert "get_backend" in vars(mlir.ModuleContext)
    start = threading.Barrier(4)

    def lower(k: int) -> str:
        start.wait()
        return stagec.jit(lambda x: jnp.sin(x) * k).lower(jax.ShapeDtypeStruct((3,), "float32")).as_text()

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            assert len(set(pool.map(lower, range(4)))) == 4
    assert {id(patch): getattr(patch.object, patch.name) for patch in PATCHES} == before


def test_a_thread_that_leaves_first_does_not_end_the_change_of_another() -> None:
    patch = patched.Patch(OWNER, "name", "a test")
    inside, left = threading.Event(), threading.Event()
    seen: list[str] = []

    def first() -> None:
        with patch.by(lambda before, self: "first of " + before(self)):
            inside.set()
            left.wait(10)
            seen.append(Owner().name())

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(10)
    assert Owner().name() == "before"
    with patch.by(lambda before, self: "second"):
        assert Owner().name() == "second"
    left.set()
    thread.join(10)
    assert (seen, Owner().name(), vars(Owner)["name"].__name__) == (["first of before"], "before", "name")
    assert "call" not in repr(vars(Owner)["name"])


def test_a_change_for_all_threads_holds_in_another() -> None:
    patch = patched.Patch(OWNER, "name", "a test", everywhere=True)
    with patch.by(lambda before, self: "changed"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(Owner().name).result() == "changed"
    assert Owner().name() == "before"
