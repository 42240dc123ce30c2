"""The Python array API standard 2025.12 on stagec's arrays, without JAX (https://data-apis.org/array-api/2025.12/).

    import stagec
    import stagec_arrays.numpy as np

    def softmax(x):
        e = np.exp(x - np.max(x, axis=-1, keepdims=True))
        return e / np.sum(e, axis=-1, keepdims=True)

    exported = stagec.jit(softmax, frontend="arrays").trace(np.ones((2, 3))).export()

`linalg` and `fft` are the standard's extensions.

Inside a function that stagec traces, operations are recorded; outside one they run at once. Shapes that depend on
elements (`nonzero`, `unique_*`, masks as indices) work only outside. Dtypes are NumPy's, with those of ml_dtypes
(`bfloat16`, `float8_e4m3fn`, `int4`). As in JAX, those of 64 bits need `enable_x64`.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing
from math import e as e, inf as inf, nan as nan, pi as pi

from stagec_arrays import dtypes as _dtypes
from stagec_arrays.dims import symbolic_shape as symbolic_shape
from stagec_arrays.dtypes import enable_x64 as enable_x64
from stagec_arrays.execution import Array as Array
from stagec_arrays.namespace import array_object as _array_object
from stagec_arrays.namespace.creation import (
    arange as arange,
    asarray as asarray,
    empty as empty,
    empty_like as empty_like,
    eye as eye,
    from_dlpack as from_dlpack,
    full as full,
    full_like as full_like,
    linspace as linspace,
    meshgrid as meshgrid,
    ones as ones,
    ones_like as ones_like,
    tril as tril,
    triu as triu,
    zeros as zeros,
    zeros_like as zeros_like,
)
from stagec_arrays.namespace.datatypes import (
    __array_namespace_info__ as __array_namespace_info__,
    astype as astype,
    broadcast_arrays as broadcast_arrays,
    broadcast_to as broadcast_to,
    can_cast as can_cast,
    finfo as finfo,
    iinfo as iinfo,
    isdtype as isdtype,
    result_type as result_type,
)
from stagec_arrays.namespace.elementwise import (
    abs as abs,
    acos as acos,
    acosh as acosh,
    add as add,
    asin as asin,
    asinh as asinh,
    atan as atan,
    atan2 as atan2,
    atanh as atanh,
    bitwise_and as bitwise_and,
    bitwise_invert as bitwise_invert,
    bitwise_left_shift as bitwise_left_shift,
    bitwise_or as bitwise_or,
    bitwise_right_shift as bitwise_right_shift,
    bitwise_xor as bitwise_xor,
    ceil as ceil,
    clip as clip,
    conj as conj,
    copysign as copysign,
    cos as cos,
    cosh as cosh,
    divide as divide,
    equal as equal,
    exp as exp,
    expm1 as expm1,
    floor as floor,
    floor_divide as floor_divide,
    greater as greater,
    greater_equal as greater_equal,
    hypot as hypot,
    imag as imag,
    isfinite as isfinite,
    isinf as isinf,
    isnan as isnan,
    less as less,
    less_equal as less_equal,
    log as log,
    log1p as log1p,
    log2 as log2,
    log10 as log10,
    logaddexp as logaddexp,
    logical_and as logical_and,
    logical_not as logical_not,
    logical_or as logical_or,
    logical_xor as logical_xor,
    maximum as maximum,
    minimum as minimum,
    multiply as multiply,
    negative as negative,
    nextafter as nextafter,
    not_equal as not_equal,
    positive as positive,
    pow as pow,
    real as real,
    reciprocal as reciprocal,
    remainder as remainder,
    round as round,
    sign as sign,
    signbit as signbit,
    sin as sin,
    sinh as sinh,
    sqrt as sqrt,
    square as square,
    subtract as subtract,
    tan as tan,
    tanh as tanh,
    trunc as trunc,
)
from stagec_arrays.namespace.indexing import take as take, take_along_axis as take_along_axis
from stagec_arrays.namespace.linear import (
    matmul as matmul,
    matrix_transpose as matrix_transpose,
    tensordot as tensordot,
    vecdot as vecdot,
)
from stagec_arrays.namespace.manipulation import (
    concat as concat,
    diff as diff,
    expand_dims as expand_dims,
    flip as flip,
    moveaxis as moveaxis,
    permute_dims as permute_dims,
    repeat as repeat,
    reshape as reshape,
    roll as roll,
    squeeze as squeeze,
    stack as stack,
    tile as tile,
    unstack as unstack,
)
from stagec_arrays.namespace.searching import (
    argmax as argmax,
    argmin as argmin,
    argsort as argsort,
    isin as isin,
    nonzero as nonzero,
    searchsorted as searchsorted,
    sort as sort,
    unique_all as unique_all,
    unique_counts as unique_counts,
    unique_inverse as unique_inverse,
    unique_values as unique_values,
    where as where,
)
from stagec_arrays.namespace.statistical import (
    all as all,
    any as any,
    count_nonzero as count_nonzero,
    cumulative_prod as cumulative_prod,
    cumulative_sum as cumulative_sum,
    max as max,
    mean as mean,
    min as min,
    prod as prod,
    std as std,
    sum as sum,
    var as var,
)
from stagec_arrays.values import ShapeDtypeStruct as ShapeDtypeStruct, broadcast_shapes as broadcast_shapes

if _typing.TYPE_CHECKING:
    from stagec_arrays.numpy import fft as fft, linalg as linalg

_array_object.install(_sys.modules[__name__])  # arrays get their operators, and this namespace

__array_api_version__ = "2025.12"
newaxis = None


def __getattr__(name: str) -> _typing.Any:  # when they are used: they are a fifth of what importing takes
    if name in ("fft", "linalg"):
        return _importlib.import_module(f"{__name__}.{name}")
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

if not _typing.TYPE_CHECKING:  # type checkers take the names that are imported or set above
    __all__ = [name for name in globals() if not name.startswith("_")]
    __all__ += ["__array_api_version__", "__array_namespace_info__", "fft", "linalg"]
