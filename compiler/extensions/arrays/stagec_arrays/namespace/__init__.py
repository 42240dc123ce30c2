"""The array API standard (https://data-apis.org/array-api/2024.12/) and parts of JAX's API, written with primitives.

A function takes stagec's arrays, NumPy's, and Python numbers, promotes them (`promotion`), and binds primitives, so
that it works in a trace and outside one alike. `stagec_arrays.numpy`, `lax`, `nn` and `random` are the faces.
"""
