"""Known defects of XLA:CPU's releases: programs that end their process or give wrong numbers, and how to avoid it.

XLA leaves products and reductions to YNNPACK, in fusions of its own kind. The defects are in what some releases make of
some of these fusions, so the optimized program shows them, and without such fusions there are none.
tests/backends/test_defects.py has the programs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from stagec.backends.compilation import CannotCompile
from stagec.core.builds import releases
from stagec.core.builds.specs import CompilerOption
from stagec.costs import hlo
from stagec.costs.hlo import Computation, Instruction
from stagec.pjrt import compatibility

T = TypeVar("T")
OPTION, AVOIDING = "xla_cpu_experimental_ynn_fusion_type", ""
"""The option that chooses what YNNPACK computes, and the value for nothing. It has no other value that avoids both."""
_FUSION = '"__ynn_fusion"'
_DIMENSIONS = 7
_ROWS = 8192
_LAYOUT = re.compile(r"\{(\d+)")
_CONTRACTED, _BATCH = re.compile(r"rhs_contracting_dims=\{(\d+)\}"), re.compile(r"rhs_batch_dims=\{([\d,]*)\}")
_REDUCED = re.compile(r" dimensions=\{([\d,]*)\}")


class Defect(NamedTuple):
    """A defect.

    issue: where it is reported; manifests/releases.toml has it in each release with the defect. what: it does, after
    "XLA of jaxlib 0.10.2". has: whether the computation of a fusion for YNNPACK does.
    """

    issue: str
    what: str
    has: Callable[[Computation], bool]


def _many_dimensions(fusion: Computation) -> bool:
    """YNNPACK has room for eight dimensions, and writes beyond it if a reduction, as a product, adds two.

    Seen with seven and eight, never with six.
    """
    return any(len(hlo.dims(instruction.type)) >= _DIMENSIONS for instruction in fusion.instructions.values())


def _product_before_reduction(fusion: Computation) -> bool:
    """YNNPACK takes the rows of a product's second operand from a wrong place, if what is contracted lies innermost.

    It does so if a reduction leaves these rows, and there are many: from 16,385 of float64 and 32,769 of float32 on.
    """
    instructions = list(fusion.instructions.values())
    reductions = [operation for operation in instructions if operation.opcode == "reduce"]
    for product in (operation for operation in instructions if operation.opcode == "dot"):
        second = fusion.instructions[product.operands[1]]
        contracted, inner = _CONTRACTED.search(product.attributes), _LAYOUT.search(second.type)
        if contracted and inner and contracted[1] == inner[1]:
            return any(_leaves_rows(reduction, product, second, fusion) for reduction in reductions)
    return False


def _leaves_rows(reduction: Instruction, product: Instruction, second: Instruction, fusion: Computation) -> bool:
    shape, reduced = hlo.dims(product.type), _REDUCED.search(reduction.attributes)
    batch = _BATCH.search(product.attributes)
    rows = len(hlo.dims(second.type)) - 1 - (len(batch[1].split(",")) if batch else 0)
    if math.prod(hlo.dims(reduction.type)) < _ROWS:
        return False
    if reduced is None or hlo.dims(fusion.instructions[reduction.operands[0]].type) != shape:
        return True  # something between them changes the shape
    return all(int(axis) < len(shape) - rows for axis in reduced[1].split(",") if axis)


DEFECTS = (
    Defect(
        "jax#40412",
        "ends the process or gives wrong numbers where it leaves arrays of seven or more dimensions to YNNPACK",
        _many_dimensions,
    ),
    Defect(
        "jax#39103",
        "gives wrong numbers where it leaves a reduction of a matrix product to YNNPACK",
        _product_before_reduction,
    ),
)
"""All known defects. jax#39257 is the first one, too."""


def of_program(program: str, release: str) -> Iterator[Defect]:
    """Yield the defects that an optimized program, as a string, has in a release of jaxlib."""
    if _FUSION not in program:
        return
    known = [defect for defect in DEFECTS if defect.issue in releases.release(release).defects]
    computations = hlo.parse(program).computations
    fusions = [
        computations[instruction.called]
        for computation in computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "fusion" and _FUSION in instruction.attributes
    ]
    yield from (defect for defect in known if any(map(defect.has, fusions)))


def _text(executable: Any) -> str:
    return str(executable.hlo_modules()[0].to_string())


def around(
    compiling: Callable[[Mapping[str, CompilerOption]], T],
    given: Mapping[str, CompilerOption],
    text: Callable[[T], str] = _text,
) -> tuple[T, dict[str, str]]:
    """Return what `compiling` returns, without known defects, and the defects that it would have.

    compiling: compiles with these options. given: the user's. text: returns the optimized program; not given: that of a
        LoadedExecutable.
    The defects are by issue, each with the option, as a manifest has it, that avoids it.
    Raises CannotCompile if the user's options have that option with another value.
    """
    release = compatibility.version()
    executable = compiling(given)
    defects = list(of_program(text(executable), release))
    if not defects:
        return executable, {}
    if OPTION in given:
        told = "; ".join(f"it {defect.what} ({defect.issue})" for defect in defects)
        what = f"XLA of jaxlib {release} makes a program of it that must not run: {told}"
        raise CannotCompile(what, f"compiler_options.{OPTION}", f'leave it out, or write {OPTION} = "{AVOIDING}"')
    avoided = {defect.issue: f'{OPTION} = "{AVOIDING}"' for defect in defects}
    return compiling({**given, OPTION: AVOIDING}), avoided
