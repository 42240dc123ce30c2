"""The Python array API standard 2024.12 on stagec's arrays, without JAX (https://data-apis.org/array-api/2024.12/).

    import stagec
    import stagec.numpy as np

    def softmax(x):
        e = np.exp(x - np.max(x, axis=-1, keepdims=True))
        return e / np.sum(e, axis=-1, keepdims=True)

    exported = stagec.jit(softmax, frontend="arrays").trace(np.ones((2, 3))).export()

Inside of a function that stagec traces, operations are recorded; outside of one they run at once. Shapes that depend on
elements (`nonzero`, `unique_*`, masks as indices) work outside alone. Dtypes are NumPy's, with those of ml_dtypes
(`bfloat16`, `float8_e4m3fn`, `int4`); there are none of 64 bits unless `enable_x64` is on, as in JAX.
"""

from __future__ import annotations

import math
from typing import Any

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
from stagec.arrays.staging import ShapeDtypeStruct

__array_api_version__ = "2024.12"
e, inf, nan, newaxis, pi = math.e, math.inf, math.nan, None, math.pi
bool = _dtypes.bool_  # noqa: A001
globals().update({name: dtype for name, dtype in _dtypes.NAMED.items() if name != "bool"})

__all__ = sorted(name for name in [*globals(), "annotations"] if not name.startswith("_") and name not in ("annotations", "math", "Any"))
_: Any = _array_object
