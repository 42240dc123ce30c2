"""What is exported is what `jax.jit` lowers for the platform, text for text, for JAX's operations by kind.

JAX may lower an operation in an older form for an export; executables are made of the newest
(`stagec.frontends.jax.kernels`). Nothing here has two forms: what has are kernels (tests/frontends/test_kernels.py).
"""

import jax
import jax.export
import pytest

import stagec
from stagec.frontends.jax import kernels
from stagec.stages.lowering import lower_exported
from tests.conformance.operations import OPERATIONS
from tests.conformance.views import portable


@pytest.mark.parametrize("kind", OPERATIONS)
def test_an_export_is_what_jit_lowers(kind: str) -> None:
    program = OPERATIONS[kind]
    jaxs, traced = jax.jit(program.function).trace(*program.args), stagec.jit(program.function).trace(*program.args)
    allowed = list(map(jax.export.DisabledSafetyCheck.custom_call, program.calls))
    for platform in program.platforms:
        theirs = portable(jaxs.lower(lowering_platforms=(platform,)).as_text())
        with kernels.noticing_forms() as forms:
            exported = traced.export((platform,), allowed)
        assert portable(lower_exported(exported, platform, {}).as_text()) == theirs, platform
        assert portable(traced.lower((platform,)).as_text()) == theirs, platform
        assert forms == [], platform
