"""Values: the abstract value of an array (without elements), and the base of the arrays that functions take."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from stagec.core.sizes.avals import Aval
from stagec_arrays import dims, dtypes
from stagec_arrays.dims import Shape
from stagec_arrays.dtypes import DType

Scalar: TypeAlias = bool | int | float | complex
Function = TypeVar("Function", bound=Callable[..., Any])


class ShapedArray(NamedTuple):
    """An abstract array, as `jax.core.ShapedArray`.

    shape: sizes, or `dims.Dim` where one is symbolic. dtype: of its elements.
    weak_type: whether it comes from Python scalars only, so that its dtype gives way to another array's.
    """

    shape: Shape
    dtype: DType
    weak_type: bool = False

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def __str__(self) -> str:
        return str(self.to_aval())

    def to_aval(self) -> Aval:
        """Return it as artifacts and manifests write it."""
        shape = tuple(size if type(size) is int else str(size) for size in self.shape)
        return Aval(dtypes.SHORT[self.dtype], shape, self.weak_type)

    @staticmethod
    def of(value: Any) -> ShapedArray:
        """Return that of anything with `shape` and `dtype`."""
        return ShapedArray(tuple(value.shape), value.dtype, bool(getattr(value, "weak_type", False)))


def physical(aval: ShapedArray) -> ShapedArray:
    """Return the form on devices: PRNG keys are their two words, in a last dimension."""
    return aval if aval.dtype is not dtypes.KEY else ShapedArray((*aval.shape, 2), dtypes.uint32)


class ShapeDtypeStruct:
    """A stand-in for an array, to trace a function for. As `jax.ShapeDtypeStruct`.

    shape: the sizes. `symbolic_shape` makes symbolic ones.
    dtype: of the elements.
    weak_type: whether it promotes as a Python number does.

    >>> stagec_arrays.ShapeDtypeStruct((8, 4), "float32")
    ShapeDtypeStruct(f32[8,4])
    """

    __slots__ = ("dtype", "shape", "weak_type")

    def __init__(self, shape: Sequence[Any], dtype: Any, weak_type: bool = False) -> None:
        self.shape = tuple(map(dims.size_of, shape))
        self.dtype = dtypes.asked(dtype)
        self.weak_type = weak_type

    def __repr__(self) -> str:
        return f"ShapeDtypeStruct({ShapedArray.of(self)})"


class Value:
    """An array: one of a trace (`tracing.Tracer`) or one with elements (`execution.Array`).

    It has the operators, methods and indexing of the standard's array object, which `namespace.array_object` gives it.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 1000  # numpy's operators leave an expression to ours

    @property
    def shape(self) -> Shape:
        """Sizes of its dimensions: `dims.Dim` if they are symbolic."""
        raise NotImplementedError

    @property
    def dtype(self) -> DType:
        """Of its elements."""
        raise NotImplementedError

    @property
    def weak_type(self) -> bool:
        """Whether its dtype gives way to another array's."""
        return False

    def same(self) -> Any:
        """Return another object of the same elements: an assignment to elements of one does not change the other."""
        return self

    @property
    def view(self) -> View | None:
        """What NumPy's array would be a view of, while that exists; None if an assignment changes no other array."""
        result: View | None = getattr(self, "_view", None)
        return None if result is None or all(array() is None for array in result.arrays) else result

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def size(self) -> Any:
        """How many elements it has."""
        return dims.product(self.shape)


class View(NamedTuple):
    """The bases of an array as a view in NumPy.

    arrays: references to the array that it is a view of, and to those that this one is a view of. write: what to write
    in place of an assignment to its elements.
    """

    arrays: tuple[weakref.ref[Any], ...]
    write: str


def as_view(x: Any, of: Any, write: str) -> Any:
    """Return an array that is a view in NumPy: an assignment to its elements is refused while `of` exists.

    x: a new object. of: the array that it is a view of. write: what to write in place of an assignment.
    """
    if isinstance(x, Value) and isinstance(of, Value):
        before: View | None = getattr(of, "_view", None)
        arrays = weakref.ref(of), *(before.arrays if before else ())
        x._view = View(arrays, write)  # type: ignore[attr-defined] # a slot of both classes
    return x


def gives_views(function: Function) -> Function:
    """Make results of a function of arrays views (`as_view`): of its first argument, or of one each for a tuple."""
    write = f"write to that array before you call {function.__name__}"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not isinstance(result, tuple):
            return as_view(result, args[0], write)
        return tuple(as_view(x, of, write) for x, of in zip(result, itertools.cycle(args), strict=False))

    return cast("Function", call)


class Literal:
    """A scalar in a program, written where it is used.

    value: of no dimensions. weak_type: whether it was a Python scalar, and its dtype gives way to an array's.
    aval: its abstract value.
    """

    __slots__ = ("aval", "value", "weak_type")
    shape: Shape = ()

    def __init__(self, value: np.ndarray[Any, Any], weak_type: bool = False) -> None:
        self.value = value
        self.weak_type = weak_type
        self.aval = ShapedArray((), value.dtype, weak_type)

    @property
    def dtype(self) -> DType:
        """Of the scalar."""
        return self.aval.dtype

    def __str__(self) -> str:
        return f"{self.value.item()}:{self.aval}"


def literal(value: Scalar, dtype: DType, weak_type: bool = False) -> Literal:
    """Return a Python scalar as one of `dtype`. Raises OverflowError if an integer does not fit in it."""
    # To a dict, 1 and True are one key, and so are 0.0 and -0.0, and parts of complex numbers.
    if isinstance(value, complex) or value == 0:
        return _literal(value, dtype, weak_type)
    return _kept_literal(type(value).__name__, value, dtype, weak_type)


@functools.lru_cache(4096)
def _kept_literal(kind: str, value: Scalar, dtype: DType, weak_type: bool) -> Literal:
    return _literal(value, dtype, weak_type)


def _literal(value: Scalar, dtype: DType, weak_type: bool) -> Literal:
    if isinstance(value, int) and dtypes.KINDS[dtype] in dtypes.INTEGRAL:
        least, most = dtypes.limits(dtype)
        if not least <= value <= most:
            raise OverflowError(f"{value} is out of the range of {dtype}")
    if isinstance(value, complex) and dtypes.KINDS[dtype] != dtypes.COMPLEX:
        raise TypeError(f"{value} is complex, and an array of {dtype} holds real numbers")
    with np.errstate(all="ignore"):
        return Literal(np.asarray(value).astype(dtype), weak_type)


def broadcast_shapes(*shapes: Sequence[Any]) -> Shape:
    """Return the shape that arrays of these shapes broadcast to, as in NumPy. Raises ValueError if they do not."""
    if len(set(map(tuple, shapes))) == 1:
        return tuple(shapes[0])
    rank = max(map(len, shapes), default=0)
    result: list[Any] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if size == 1:
                continue
            if result[axis] == 1:
                result[axis] = size
            elif result[axis] != size:
                raise ValueError(f"shapes {', '.join(map(shown, shapes))} do not broadcast")
    return tuple(result)


def shown(shape: Iterable[Any]) -> str:
    """Return a shape as Python writes it, symbolic sizes by their names."""
    sizes = [str(size) for size in shape]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def axis_of(axis: Any, ndim: int, what: str = "axis") -> int:
    """Return an axis counted from the front. Raises IndexError if an array of `ndim` dimensions does not have it."""
    try:
        number = axis.__index__()
    except AttributeError:
        raise TypeError(f"{what} is {axis!r}; write an integer") from None
    if not -ndim <= number < ndim:
        raise IndexError(f"{what} {number} is out of range for an array of {ndim} dimensions")
    return int(number % ndim)


def one_axis_of(axis: Any, ndim: int, function: str) -> int:
    """Return an axis as `axis_of` does; None is that of a vector. Raises ValueError for None of another array."""
    if axis is None and ndim != 1:
        raise ValueError(f"{function}: an array of {ndim} dimensions needs an axis")
    return axis_of(0 if axis is None else axis, ndim)


def axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the axes that an `axis` argument names, each counted from the front: all for None. Raises IndexError."""
    if axis is None:
        return tuple(range(ndim))
    given = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    axes = tuple(axis_of(number, ndim) for number in given)
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis {axis} names one dimension twice")
    return axes
