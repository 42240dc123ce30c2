"""The Python array API standard 2025.12 on stagec's arrays, without JAX (https://data-apis.org/array-api/2025.12/).

    import stagec
    import stagec.numpy as np

    def softmax(x):
        e = np.exp(x - np.max(x, axis=-1, keepdims=True))
        return e / np.sum(e, axis=-1, keepdims=True)

    exported = stagec.jit(softmax, frontend="arrays").trace(np.ones((2, 3))).export()

`linalg` and `fft` are the standard's extensions.

Inside a function that stagec traces, operations are recorded; outside one they run at once. Shapes that depend on
elements (`nonzero`, `unique_*`, masks as indices) work only outside. Dtypes are NumPy's, with those of ml_dtypes
(`bfloat16`, `float8_e4m3fn`, `int4`). As in JAX, those of 64 bits need `enable_x64`.
"""

from __future__ import annotations

import importlib
import math
import sys
from typing import TYPE_CHECKING, Any

from stagec.arrays import dtypes as _dtypes
from stagec.arrays.dims import symbolic_shape
from stagec.arrays.dtypes import enable_x64
from stagec.arrays.execution import Array
from stagec.arrays.namespace import array_object as _array_object
from stagec.arrays.namespace.creation import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    meshgrid,
    ones,
    ones_like,
    tril,
    triu,
    zeros,
    zeros_like,
)
from stagec.arrays.namespace.datatypes import (
    __array_namespace_info__,
    astype,
    broadcast_arrays,
    broadcast_to,
    can_cast,
    finfo,
    iinfo,
    isdtype,
    result_type,
)
from stagec.arrays.namespace.elementwise import (
    abs,  # noqa: A004 - the standard's names
    acos,
    acosh,
    add,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    bitwise_and,
    bitwise_invert,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    ceil,
    clip,
    conj,
    copysign,
    cos,
    cosh,
    divide,
    equal,
    exp,
    expm1,
    floor,
    floor_divide,
    greater,
    greater_equal,
    hypot,
    imag,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    log,
    log1p,
    log2,
    log10,
    logaddexp,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    multiply,
    negative,
    nextafter,
    not_equal,
    positive,
    pow,  # noqa: A004
    real,
    reciprocal,
    remainder,
    round,  # noqa: A004
    sign,
    signbit,
    sin,
    sinh,
    sqrt,
    square,
    subtract,
    tan,
    tanh,
    trunc,
)
from stagec.arrays.namespace.indexing import take, take_along_axis
from stagec.arrays.namespace.linear import matmul, matrix_transpose, tensordot, vecdot
from stagec.arrays.namespace.manipulation import (
    concat,
    diff,
    expand_dims,
    flip,
    moveaxis,
    permute_dims,
    repeat,
    reshape,
    roll,
    squeeze,
    stack,
    tile,
    unstack,
)
from stagec.arrays.namespace.searching import (
    argmax,
    argmin,
    argsort,
    isin,
    nonzero,
    searchsorted,
    sort,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
    where,
)
from stagec.arrays.namespace.statistical import (
    all,  # noqa: A004
    any,  # noqa: A004
    count_nonzero,
    cumulative_prod,
    cumulative_sum,
    max,  # noqa: A004
    mean,
    min,  # noqa: A004
    prod,
    std,
    sum,  # noqa: A004
    var,
)
from stagec.arrays.values import ShapeDtypeStruct, broadcast_shapes

if TYPE_CHECKING:
    from stagec.numpy import fft, linalg

_array_object.install(sys.modules[__name__])  # arrays get their operators, and this namespace

__array_api_version__ = "2025.12"
e, inf, nan, newaxis, pi = math.e, math.inf, math.nan, None, math.pi


def __getattr__(name: str) -> Any:  # when they are used: they are a fifth of what importing takes
    if name in ("fft", "linalg"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__} has no attribute {name}")


bool = _dtypes.bool_  # noqa: A001
int2 = _dtypes.NAMED["int2"]
int4 = _dtypes.NAMED["int4"]
int8 = _dtypes.NAMED["int8"]
int16 = _dtypes.NAMED["int16"]
int32 = _dtypes.NAMED["int32"]
int64 = _dtypes.NAMED["int64"]
uint2 = _dtypes.NAMED["uint2"]
uint4 = _dtypes.NAMED["uint4"]
uint8 = _dtypes.NAMED["uint8"]
uint16 = _dtypes.NAMED["uint16"]
uint32 = _dtypes.NAMED["uint32"]
uint64 = _dtypes.NAMED["uint64"]
float16 = _dtypes.NAMED["float16"]
float32 = _dtypes.NAMED["float32"]
float64 = _dtypes.NAMED["float64"]
bfloat16 = _dtypes.NAMED["bfloat16"]
complex64 = _dtypes.NAMED["complex64"]
complex128 = _dtypes.NAMED["complex128"]
float4_e2m1fn = _dtypes.NAMED["float4_e2m1fn"]
float8_e3m4 = _dtypes.NAMED["float8_e3m4"]
float8_e4m3 = _dtypes.NAMED["float8_e4m3"]
float8_e4m3b11fnuz = _dtypes.NAMED["float8_e4m3b11fnuz"]
float8_e4m3fn = _dtypes.NAMED["float8_e4m3fn"]
float8_e4m3fnuz = _dtypes.NAMED["float8_e4m3fnuz"]
float8_e5m2 = _dtypes.NAMED["float8_e5m2"]
float8_e5m2fnuz = _dtypes.NAMED["float8_e5m2fnuz"]
float8_e8m0fnu = _dtypes.NAMED["float8_e8m0fnu"]

__all__ = [
    "Array",
    "ShapeDtypeStruct",
    "__array_api_version__",
    "__array_namespace_info__",
    "abs",
    "acos",
    "acosh",
    "add",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "asarray",
    "asin",
    "asinh",
    "astype",
    "atan",
    "atan2",
    "atanh",
    "bfloat16",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "bool",
    "broadcast_arrays",
    "broadcast_shapes",
    "broadcast_to",
    "can_cast",
    "ceil",
    "clip",
    "complex64",
    "complex128",
    "concat",
    "conj",
    "copysign",
    "cos",
    "cosh",
    "count_nonzero",
    "cumulative_prod",
    "cumulative_sum",
    "diff",
    "divide",
    "e",
    "empty",
    "empty_like",
    "enable_x64",
    "equal",
    "exp",
    "expand_dims",
    "expm1",
    "eye",
    "fft",
    "finfo",
    "flip",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float16",
    "float32",
    "float64",
    "floor",
    "floor_divide",
    "from_dlpack",
    "full",
    "full_like",
    "greater",
    "greater_equal",
    "hypot",
    "iinfo",
    "imag",
    "inf",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "isdtype",
    "isfinite",
    "isin",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "linalg",
    "linspace",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "matmul",
    "matrix_transpose",
    "max",
    "maximum",
    "mean",
    "meshgrid",
    "min",
    "minimum",
    "moveaxis",
    "multiply",
    "nan",
    "negative",
    "newaxis",
    "nextafter",
    "nonzero",
    "not_equal",
    "ones",
    "ones_like",
    "permute_dims",
    "pi",
    "positive",
    "pow",
    "prod",
    "real",
    "reciprocal",
    "remainder",
    "repeat",
    "reshape",
    "result_type",
    "roll",
    "round",
    "searchsorted",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sort",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "subtract",
    "sum",
    "symbolic_shape",
    "take",
    "take_along_axis",
    "tan",
    "tanh",
    "tensordot",
    "tile",
    "tril",
    "triu",
    "trunc",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
    "unstack",
    "var",
    "vecdot",
    "where",
    "zeros",
    "zeros_like",
]
