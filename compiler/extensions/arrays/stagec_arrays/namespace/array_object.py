"""Operators, properties and methods of arrays, from the standard's array object.

`stagec_arrays.numpy` calls `install`, which gives them to the classes of arrays.
https://data-apis.org/array-api/2024.12/API_specification/array_object.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from stagec_arrays import binding, execution, tracing
from stagec_arrays.dims import Dim
from stagec_arrays.dtypes import INTEGRAL, KINDS
from stagec_arrays.namespace import assignment, elementwise, indexing, linear, manipulation
from stagec_arrays.namespace.datatypes import astype, check_device, device_of
from stagec_arrays.namespace.promotion import is_jaxs, is_scalar
from stagec_arrays.primitives.structural import transpose
from stagec_arrays.values import Value, as_view

_TAKEN = (Value, np.ndarray, np.generic, Dim)


def _operator(function: Callable[[Any, Any], Any], reflected: bool = False) -> Callable[[Any, Any], Any]:
    def operator(self: Any, other: Any) -> Any:
        if not (is_scalar(other) or isinstance(other, _TAKEN) or is_jaxs(other)):
            return NotImplemented
        return function(other, self) if reflected else function(self, other)

    return operator


_BINARY = {
    "add": elementwise.add,
    "sub": elementwise.subtract,
    "mul": elementwise.multiply,
    "truediv": elementwise.divide,
    "floordiv": elementwise.floor_divide,
    "mod": elementwise.remainder,
    "pow": elementwise.pow,
    "matmul": linear.matmul,
    "and": elementwise.bitwise_and,
    "or": elementwise.bitwise_or,
    "xor": elementwise.bitwise_xor,
    "lshift": elementwise.bitwise_left_shift,
    "rshift": elementwise.bitwise_right_shift,
}
_COMPARISONS = {
    "eq": elementwise.equal,
    "ne": elementwise.not_equal,
    "lt": elementwise.less,
    "le": elementwise.less_equal,
    "gt": elementwise.greater,
    "ge": elementwise.greater_equal,
}
_UNARY = {
    "abs": elementwise.abs,
    "neg": elementwise.negative,
    "pos": elementwise.positive,
    "invert": elementwise.bitwise_invert,
}


def _number(kind: Callable[[Any], Any], name: str, write: str) -> Callable[[Any], Any]:
    def convert(self: Any) -> Any:
        known = binding.known(self)
        if known is None:
            raise tracing.refuse(self, name, write)
        if known.size != 1 or known.ndim != 0:
            raise TypeError(f"{name} takes an array of no dimensions, not of shape {self.shape}")
        return kind(known[()])

    return convert


def _index(element: Any) -> int:
    if KINDS[element.dtype] not in INTEGRAL:
        raise TypeError(f"an index or a Python number is an integer, not {element.dtype}")
    return int(element)


def _format(self: Any, spec: str) -> str:
    """Return an array of no dimensions as Python formats its number."""
    return format(_item(self), spec) if spec and not self.shape else object.__format__(self, spec)


_IF = "write where(condition, a, b), or stagec_arrays.lax.cond or while_loop"
_SIZE = "give a number, make the argument static, or keep it an array"
_NUMBERS = {
    "__bool__": _number(bool, "Python's if, while, and, or, not or bool()", _IF),
    "__int__": _number(int, "int()", _SIZE),
    "__float__": _number(float, "float()", _SIZE),
    "__complex__": _number(complex, "complex()", _SIZE),
    "__index__": _number(_index, "an index or a Python number", _SIZE),
}


def _len(self: Any) -> int:
    if not self.shape:
        raise TypeError("len() of an array of no dimensions")
    return int(self.shape[0])


def _iter(self: Any) -> Iterator[Any]:
    if not self.shape:
        raise TypeError("an array of no dimensions has no parts to iterate over")
    write = "write a[i, 0] = 1 for i in range(len(a)), not row[0] = 1 for row in a"
    return (as_view(part, self, write) for part in manipulation.unstack(self))


def _gives(namespace: ModuleType) -> Callable[..., ModuleType]:
    def array_namespace(self: Any, /, *, api_version: str | None = None) -> ModuleType:
        """Return `stagec_arrays.numpy`. Raises ValueError for a version of the standard that it does not have."""
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12", "2025.12"):
            raise ValueError(f"stagec_arrays.numpy has version 2025.12 of the array API standard, not {api_version}")
        return namespace

    return array_namespace


def _transposed(self: Any) -> Any:
    """Of a matrix, with rows and columns exchanged."""
    if len(self.shape) != 2:
        raise ValueError(f".T needs a matrix, not an array of {len(self.shape)} dimensions: write .mT or permute_dims")
    return as_view(transpose(self, (1, 0)), self, "write a[:, 0] = 1, not a.T[0] = 1")


def _to_device(self: Any, device: Any, /, *, stream: Any = None) -> Any:
    """Return the array on a device, which is that of all arrays."""
    check_device(device)
    if stream is not None:
        raise ValueError("to_device: arrays have no streams; leave stream out")
    return self


def _item(self: Any) -> Any:
    """Return the only element as Python's number."""
    known = binding.known(self)
    if known is None:
        raise tracing.refuse(self, "item()", _SIZE)
    return known.item()


def _tolist(self: Any) -> Any:
    """Return the elements as Python's numbers, in lists."""
    known = binding.known(self)
    if known is None:
        raise tracing.refuse(self, "tolist()", "return it from the function")
    return known.tolist()


def _astype(self: Any, dtype: Any, /, *, copy: bool = True) -> Any:
    """Return the elements as ones of another dtype."""
    return astype(self, dtype, copy=copy)


def install(namespace: ModuleType) -> None:
    """Give the classes of arrays the operators and methods of the standard's array object.

    namespace: `stagec_arrays.numpy`, the result of `__array_namespace__`.
    """
    attributes: dict[str, Any] = {f"__{name}__": function for name, function in _UNARY.items()}
    for name, function in _BINARY.items():
        attributes[f"__{name}__"] = _operator(function)
        attributes[f"__r{name}__"] = _operator(function, reflected=True)
    attributes |= {f"__{name}__": _operator(function) for name, function in _COMPARISONS.items()}
    attributes |= _NUMBERS
    attributes |= {
        "__getitem__": indexing.getitem,
        "__setitem__": assignment.setitem,
        "__format__": _format,
        "__len__": _len,
        "__iter__": _iter,
        "__array_namespace__": _gives(namespace),
        "to_device": _to_device,
        "item": _item,
        "tolist": _tolist,
        "astype": _astype,
        "reshape": lambda self, *shape: manipulation.reshape(self, shape[0] if len(shape) == 1 else shape),
        "T": property(_transposed),
        "mT": property(linear.matrix_transpose),
        "device": property(device_of),
        "at": property(assignment.At),
        "real": property(elementwise.real),
        "imag": property(elementwise.imag),
    }
    for kind in (Value, execution.Array):  # the second has another base that can be converted to a float and an int
        for name, attribute in attributes.items():
            setattr(kind, name, attribute)
    # The quotient of two sizes is not a size.
    Dim.__truediv__ = elementwise.divide  # type: ignore[operator]
    Dim.__rtruediv__ = lambda self, other: elementwise.divide(other, self)  # type: ignore[attr-defined]
