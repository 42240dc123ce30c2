"""Array functions traced by stagec itself, on numpy and jaxlib alone: the arrays frontend, without JAX.

Three layers, from the bottom to the top:

1. Values and their rules: `dtypes` (kinds, promotion), `dims` (symbolic sizes), `values` (what is known of an array),
   `program` (a function as a list of equations), `tracing` (running a function to get its program), `lowering` (a
   program to StableHLO), `execution` (arrays outside a trace), `binding` (an operation goes to one or the other).
2. `primitives`: the table of operations, each with its rule of shapes, its lowering and its derivative.
3. `namespace`: the Python array API standard (https://data-apis.org/array-api/2025.12/) and parts of JAX's API, written
   with primitives.

`primitives.derivatives` turns a program into that of its vector-Jacobian product, `exporting` into a module in the form
of `jax.export`. The public faces are `stagec.numpy`, `stagec.lax`, `stagec.nn` and `stagec.random`. ARCHITECTURE.md
says how to add a primitive, a function and a test.
"""
