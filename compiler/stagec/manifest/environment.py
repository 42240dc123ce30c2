"""Environment variables that a manifest declares for tracing: check their names.

An action sets them after it has imported JAX and before it imports the function's module, so a library sees them when
it is imported. It refuses variables that were read by then, that stagec sets itself, or that belong to a machine.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from stagec.core.messages.errors import show
from stagec.manifest.values import Refusal, abbreviate, refuse

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"


class _Row(NamedTuple):
    """Variables that a manifest may not set. names: a regular expression."""

    names: str
    what: str
    write: str


_JAX = "JAX reads its variables before the manifest's are set"
_COMPILER = "the compiler reads it, and tracing compiles nothing"
_MACHINE = "it belongs to a machine, and every machine makes the same artifact"
_SET = "stagec sets it itself, the same for every function"
_LEAVE_OUT = "leave it out"
_REFUSED = (
    _Row("JAX_ENABLE_X64", _JAX, "write enable_x64 = true"),
    _Row("JAX_DEFAULT_MATMUL_PRECISION", _JAX, 'write for example matmul_precision = "highest"'),
    _Row("JAX_DEFAULT_PRNG_IMPL", _JAX, 'write for example prng_impl = "rbg"'),
    _Row("JAX_PLATFORMS|JAX_PLATFORM_NAME", _JAX, 'list targets instead, for example targets = ["cpu-avx2"]'),
    _Row("JAX_.*", _JAX, "call jax.config.update in the module of the entry"),
    _Row("XLA_.*|TF_XLA_.*|LIBTPU_.*", _COMPILER, "write its flags as compiler_options of a target"),
    _Row("PYTHONPATH", "imports come from inputs of the build", "name the modules in deps, their folders in imports"),
    _Row("PYTHON.*", "Python reads it when it starts, and stagec sets what matters", _LEAVE_OUT),
    _Row("PATH|LD_.*", "programs and libraries come from inputs of the build", "name files in deps or data"),
    _Row("GLIBC_TUNABLES|MALLOC_.*", "the C library reads it when the process starts", _LEAVE_OUT),
    _Row("HOME|XDG_.*|TMPDIR|TEMP|TMP|USER|LOGNAME|HOSTNAME|PWD|SHELL", _MACHINE, _LEAVE_OUT),
    _Row("CUDA_VISIBLE_DEVICES|TPU_.*", "tracing has no device", 'list targets, for example targets = ["h100-sxm"]'),
    _Row("LC_.*|LANG|LANGUAGE|TZ|OPENBLAS_NUM_THREADS|OMP_NUM_THREADS", _SET, _LEAVE_OUT),
)

ENVIRONMENT_SCHEMA: dict[str, object] = {
    "type": "object",
    "propertyNames": {"pattern": f"^{_NAME}$"},
    "additionalProperties": {"type": "string"},
}


def read_environment(value: object) -> Mapping[str, str]:
    """Read a table of variables, sorted by name; each value is a string."""
    if not isinstance(value, dict):
        raise refuse(Refusal((), f"{abbreviate(value)} is not a table", 'write for example { EQX_ON_ERROR = "nan" }'))
    refusals = [refusal for name, text in value.items() for refusal in _refusals(name, text)]
    if refusals:
        raise refuse(*refusals)
    return dict(sorted(value.items()))


def _refusals(name: str, value: object) -> list[Refusal]:
    row = next((row for row in _REFUSED if re.fullmatch(row.names, name)), None)
    if not re.fullmatch(_NAME, name):
        return [Refusal((name,), "not a name of a variable", "write letters, digits and _, no digit first")]
    if row is not None:
        return [Refusal((name,), row.what, row.write)]
    if not isinstance(value, str):
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return [Refusal((name,), f"{abbreviate(value)} is not a string", f"write {name} = {show(text)}")]
    if "\0" in value:
        return [Refusal((name,), "a variable cannot hold the character 0", "leave that character out")]
    return []
