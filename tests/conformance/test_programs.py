"""Every program, staged by JAX and by stagec in every way that both have, gives the same bits."""

from typing import Any

import jax
import jax.export
import numpy as np
import pytest

import stagec
from tests.conformance.members import bits
from tests.conformance.programs import Program, mesh_of, programs

PROGRAMS = programs()


def fresh(args: Any) -> Any:
    """Arguments of their own for each call: a call may donate them."""
    return jax.tree.map(np.array, args)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {}


@pytest.fixture(params=PROGRAMS)
def case(request: pytest.FixtureRequest, expected: dict[str, Any]) -> tuple[Program, Any]:
    """A program, and what jax.jit computes."""
    name = request.param
    program = PROGRAMS[name]
    if name not in expected:
        expected[name] = bits(jax.jit(program.function, **program.options)(*fresh(program.args)))
    return program, expected[name]


def exported_by_jax(program: Program) -> bytes:
    jitted = jax.jit(program.function, **program.options)
    return bytes(jax.export.export(jitted, platforms=["cpu"])(*program.args).serialize())


def test_jit(case: tuple[Program, Any]) -> None:
    program, expected = case
    assert bits(stagec.jit(program.function, **program.options)(*fresh(program.args))) == expected


def test_lower_and_compile(case: tuple[Program, Any]) -> None:
    program, expected = case
    compiled = stagec.jit(program.function, **program.options).lower(*program.args).compile()
    assert bits(compiled(*fresh(program.args))) == expected


def test_compiled_survives_serialization(case: tuple[Program, Any]) -> None:
    program, expected = case
    compiled = stagec.jit(program.function, **program.options).lower(*program.args).compile()
    assert bits(stagec.Compiled.deserialize(compiled.serialize())(*fresh(program.args))) == expected


def test_what_jax_exports_runs_here(case: tuple[Program, Any]) -> None:
    program, expected = case
    assert bits(stagec.Exported.deserialize(exported_by_jax(program)).call(*fresh(program.args))) == expected


def test_what_stagec_writes_runs_in_jax(case: tuple[Program, Any]) -> None:
    program, expected = case
    ours = stagec.Exported.deserialize(exported_by_jax(program)).serialize()
    theirs = jax.export.deserialize(bytearray(ours))
    args = fresh(program.args)
    if program.mesh:
        replicated = jax.sharding.NamedSharding(mesh_of(program.mesh), jax.sharding.PartitionSpec())
        args = jax.device_put(args, replicated)
    assert bits(jax.jit(theirs.call)(*args)) == expected
