"""Tracing: run a function with `Tracer`s instead of arrays; they record its operations as a `Program`.

A `Trace` is one such run. The current one is in a context variable, so that threads and coroutines each have their own,
and an error leaves none behind. Traces nest: inside a function that is traced, `trace` records a part of it apart
(a loop's body). That part may use values of the traces around it, which become its first inputs (`Recorded.captured`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
from jaxlib import _jax

from stagec_arrays import dims
from stagec_arrays.dims import Shape
from stagec_arrays.dtypes import KEY, DType
from stagec_arrays.locations import here, located
from stagec_arrays.program import Equation, Operand, Primitive, Program, Variable
from stagec_arrays.values import Literal, ShapedArray, Value


class TracerError(TypeError):
    """A value of a trace is used as one that is known: in Python's `if`, as an `int`, or by NumPy."""


def operand_of(value: Any) -> Any:
    """Return the variable or constant that a tracer stands for at present; None for anything else."""
    return value._operand if isinstance(value, Tracer) else None


class LeakedTracer(ValueError):
    """A value of a trace is used where that trace is over, or in another one that is not inside it."""


class Tracer(Value):
    """An array of a trace: an abstract value without elements."""

    __slots__ = ("__weakref__", "_operand", "_trace", "_view")

    def __init__(self, trace: Trace, operand: Operand) -> None:
        self._trace = trace
        self._operand = operand

    @property
    def aval(self) -> ShapedArray:
        """Its abstract value."""
        return self._operand.aval

    @property
    def shape(self) -> Shape:
        """Sizes of its dimensions."""
        return self._operand.aval.shape

    @property
    def dtype(self) -> DType:
        """Of its elements."""
        return self._operand.aval.dtype

    @property
    def weak_type(self) -> bool:
        """Whether its dtype gives way to another array's."""
        return self._operand.aval.weak_type

    def same(self) -> Tracer:
        """Return another tracer of the same variable."""
        return Tracer(self._trace, self._operand)

    copy_of = __copy__ = same

    def __deepcopy__(self, memo: Any) -> Tracer:
        return self.same()

    def known(self) -> np.ndarray[Any, Any] | None:
        """Return its elements if it is a constant of its trace; None otherwise."""
        if isinstance(self._operand, Literal):
            return self._operand.value
        return self._trace.constants().get(self._operand)

    def __repr__(self) -> str:
        return f"Tracer({self.aval})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise refuse(self, "pickle", "return it from the function")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        known = self.known()
        if known is None:
            raise refuse(self, "NumPy", "write the function of stagec_arrays.numpy in its place")
        return np.array(known, dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        known = self.known()
        if known is None:
            raise refuse(self, "DLPack", "return it from the function")
        return np.array(known).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU


class Trace:
    """One run of a function that is traced: the equations up to now.

    around: the trace in which this one was begun; None for the outermost. name: of the function, for messages.
    """

    __slots__ = ("_captured", "_constants", "_sizes", "around", "equations", "is_open", "name")

    def __init__(self, around: Trace | None, name: str) -> None:
        self.around = around
        self.name = name
        self.is_open = True
        self.equations: list[Equation] = []
        self._captured: dict[Variable, tuple[Tracer, Variable]] = {}
        self._constants: dict[tuple[int, bool], tuple[Any, np.ndarray[Any, Any], Variable]] = {}
        self._sizes: set[Any] = set() if around is None else around._sizes

    def argument(self, variable: Variable) -> Tracer:
        """Return an argument: its sizes are 0 or more, whatever they are."""
        self._sizes.update(variable.aval.shape)
        return Tracer(self, variable)

    def constant(self, array: np.ndarray[Any, Any]) -> Tracer:
        """Return a known array as a value of this trace."""
        return Tracer(self, self.operand(array))

    def operand(self, value: Any) -> Operand:
        """Return the operand for a value in this trace: its own, one of the traces around it, or a known array.

        Raises LeakedTracer.
        """
        if isinstance(value, Tracer):
            if value._trace is self:
                return value._operand
            return value._operand if isinstance(value._operand, Literal) else self._capture(value, value._operand)
        if isinstance(value, Literal):
            return value
        array = np.asarray(value if value.dtype is not KEY else value.words())
        if array.ndim == 0:
            return Literal(array)
        held = getattr(value, "_buffer", value)  # what is the same for as long as the elements are
        which = id(held), value.dtype is KEY  # keys and their words are one buffer
        result = self._constants.get(which)
        if result is None:
            result = self._constants[which] = held, array, Variable(ShapedArray(tuple(value.shape), value.dtype))
        return result[2]

    def record(
        self, primitive: Primitive, values: Sequence[Any], params: Mapping[str, Any], avals: Sequence[ShapedArray]
    ) -> list[Tracer]:
        """Add an equation, and return its results. avals: their abstract values."""
        for aval in avals:
            if not self._sizes.issuperset(aval.shape):
                self._check_sizes(primitive.name, aval.shape)
        outputs = tuple(map(Variable, avals))
        inputs = tuple(map(self.operand, values))
        self.equations.append(Equation(primitive, inputs, params, outputs, _jax.Traceback.get_traceback()))
        return [Tracer(self, variable) for variable in outputs]

    def _check_sizes(self, name: str, shape: Shape) -> None:
        """Remember sizes that are 0 or more for all numbers that an artifact may be called with. Raises ValueError."""
        for size in shape:
            if size not in self._sizes and not dims.at_least(size, 0):
                what = (
                    f"{name}: a size of the result, {size}, may be negative for sizes that an artifact is called with"
                )
                raise ValueError(f'{what}; add the constraint "{size} >= 0"')
            self._sizes.add(size)

    def captured(self) -> dict[Variable, Tracer]:
        """Return the values of the traces around this one that it uses, by the variables that stand for them here."""
        return {variable: outer for outer, variable in self._captured.values()}

    def constants(self) -> dict[Variable, np.ndarray[Any, Any]]:
        """Return the known arrays that it uses, by the variables that stand for them."""
        return {variable: array for _, array, variable in self._constants.values()}

    def _capture(self, value: Tracer, variable: Variable) -> Variable:
        result = self._captured.get(variable)
        if result is not None:
            return result[1]
        home = value._trace
        if not home.is_open:
            what = f"a value of the traced function {home.name} ({value.aval}) is used after that function was traced"
            raise LeakedTracer(f"{what}, at {here()}; return it from the function, or compute it again")
        trace: Trace | None = self.around
        while trace is not None and trace is not home:
            trace = trace.around
        if trace is None:
            what = f"a value of the traced function {home.name} ({value.aval}) is used in {self.name}, at {here()}"
            raise LeakedTracer(f"{what}, which is traced apart from it; pass it as an argument")
        inner = Variable(value.aval)
        # Of its own: an assignment to an element gives the user's object another variable.
        self._captured[variable] = Tracer(home, variable), inner
        return inner


_CURRENT: ContextVar[Trace | None] = ContextVar("stagec_trace", default=None)


def current() -> Trace | None:
    """Return the trace in which this thread is; None if it is in none, and operations run at once."""
    return _CURRENT.get()


class Recorded(NamedTuple):
    """The result of `trace`.

    program: its inputs are what was captured, and then the arguments. result: what the function returned, with
    `Tracer`s in it, which are of use to nobody else. captured: values of the traces around it.
    """

    program: Program
    captured: Sequence[Tracer]


def trace(
    function: Callable[..., Sequence[Any]], avals: Sequence[ShapedArray], name: str = "", apart: bool = False
) -> Recorded:
    """Run a function of arrays with tracers for `avals`, and return the trace.

    function: gives a sequence of results: arrays, of this trace or others. name: of it, for messages.
    apart: whether it may not use values of the trace that is current.
    Raises the errors of the function, and LeakedTracer.
    """
    run = Trace(None if apart else _CURRENT.get(), name or getattr(function, "__name__", "a function"))
    token = _CURRENT.set(run)
    try:
        given = [Variable(aval) for aval in avals]
        inputs = list(map(run.argument, given))
        outputs = [run.operand(output) for output in function(*inputs)]
    except (TypeError, ValueError, LookupError, ArithmeticError, NameError, AttributeError) as error:
        located(error)
        raise
    finally:
        _CURRENT.reset(token)
        run.is_open = False
    captured = run.captured()
    variables = [*captured, *given]
    program = Program(variables, run.equations, outputs, run.constants())
    return Recorded(program, list(captured.values()))


def refuse(value: Tracer, use: str, write: str) -> TracerError:
    """Return the error for a use of a tracer that needs its elements: "int() of it"."""
    what = f"{here()}: {use} needs the elements of an array that is traced ({value.aval}), which are not known yet"
    return TracerError(f"{what}; {write}")
