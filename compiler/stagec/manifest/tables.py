"""The common parts of a manifest's tables."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, StringConstraints, WithJsonSchema

from stagec.core.data import reading
from stagec.core.messages.errors import Problem, StagecError
from stagec.manifest import toml
from stagec.manifest.values import SCALAR_SCHEMA, Scalar, read_distinct, read_scalar

NAME = r"^[A-Za-z_][A-Za-z0-9_-]*$"
"""Names of manifests, functions and targets: parts of Bazel target names, so without dots."""
SHAPE = r"^[1-9][0-9]*(x[1-9][0-9]*)*$"
"""Sizes along axes."""
RELEASE = r"^[0-9]+(\.[0-9]+)+$"
"""A release of jaxlib."""


class Table(BaseModel):
    """A table: it has no other keys than its model, and values of no other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


CompilerOptions: TypeAlias = Annotated[
    dict[str, Annotated[Scalar, PlainValidator(read_scalar), WithJsonSchema(SCALAR_SCHEMA)]],
    Field(
        description="XLA flags of this target, as in the compiler_options of jax.jit. And, as there, "
        'optimization_level and memory_fitting_level ("O0" to "O3"), exec_time_optimization_effort and '
        "memory_fitting_effort (-1.0 to 1.0; XLA has them before jaxlib 0.11.1), and fdo_profile (a "
        "ProfiledInstructionsProto in protobuf's text format).",
        examples=[{"xla_cpu_enable_fast_math": False, "optimization_level": "O1"}],
    ),
]

Jaxlib: TypeAlias = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=RELEASE)], ...] | None,
    AfterValidator(lambda given: given if given is None else read_distinct(given)),
    Field(
        min_length=1,
        description="Releases of jaxlib to compile executables with: one for each. An executable runs only with the "
        "jaxlib that made it. Those beside the build's own are declared in the workspace. Default: the build's own. A "
        "target takes it from [manifest] unless it says otherwise.",
        examples=[["0.10.1", "0.10.2"]],
    ),
]


def read(key: str, name: str, file: str, folder: Path, write: str) -> tuple[str, bytes]:
    """Return the name for messages of the file at `key`, and its content.

    file: the manifest's name in messages. folder: its folder. write: the advice if the file cannot be read.
    """
    shown = str(PurePosixPath(file).parent / name)
    try:
        return shown, reading.whole(folder / name, toml.LARGEST)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StagecError(Problem("", key, f"cannot read {shown}: {reason}", write)) from None
