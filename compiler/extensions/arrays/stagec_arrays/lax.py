"""Control flow, windows, places, orders: functions of arrays under the names and with the semantics of `jax.lax`.

`cond`, `switch`, `while_loop`, `fori_loop`, `scan`, `map` and `associative_scan` take functions and pytrees of arrays
(https://docs.jax.dev/en/latest/jax.lax.html). All work in a trace and outside one.
"""

from stagec_arrays import numpy as _numpy  # noqa: F401 - it gives arrays their operators
from stagec_arrays.namespace.control import (
    cond as cond,
    fori_loop as fori_loop,
    map as map,
    scan as scan,
    switch as switch,
    while_loop as while_loop,
)
from stagec_arrays.namespace.gather_scatter import (
    GatherDimensionNumbers as GatherDimensionNumbers,
    ScatterDimensionNumbers as ScatterDimensionNumbers,
    dynamic_index_in_dim as dynamic_index_in_dim,
    dynamic_slice as dynamic_slice,
    dynamic_slice_in_dim as dynamic_slice_in_dim,
    dynamic_update_index_in_dim as dynamic_update_index_in_dim,
    dynamic_update_slice as dynamic_update_slice,
    dynamic_update_slice_in_dim as dynamic_update_slice_in_dim,
    gather as gather,
    scatter as scatter,
    scatter_add as scatter_add,
    scatter_max as scatter_max,
    scatter_min as scatter_min,
    scatter_mul as scatter_mul,
    slice_in_dim as slice_in_dim,
)
from stagec_arrays.namespace.operators import (
    add as add,
    cbrt as cbrt,
    clamp as clamp,
    digamma as digamma,
    erf as erf,
    erf_inv as erf_inv,
    erfc as erfc,
    lgamma as lgamma,
    logistic as logistic,
    max as max,
    min as min,
    mul as mul,
    optimization_barrier as optimization_barrier,
    rsqrt as rsqrt,
    select as select,
    sort as sort,
    sort_key_val as sort_key_val,
    top_k as top_k,
)
from stagec_arrays.namespace.parallel import (
    all_gather as all_gather,
    all_to_all as all_to_all,
    axis_index as axis_index,
    axis_size as axis_size,
    pmax as pmax,
    pmean as pmean,
    pmin as pmin,
    ppermute as ppermute,
    psum as psum,
    psum_scatter as psum_scatter,
    with_sharding_constraint as with_sharding_constraint,
)
from stagec_arrays.namespace.transformations import stop_gradient as stop_gradient
from stagec_arrays.namespace.windows import (
    ConvDimensionNumbers as ConvDimensionNumbers,
    associative_scan as associative_scan,
    conv as conv,
    conv_general_dilated as conv_general_dilated,
    cumlogsumexp as cumlogsumexp,
    cummax as cummax,
    cummin as cummin,
    cumprod as cumprod,
    cumsum as cumsum,
    reduce_window as reduce_window,
)
