"""The array API standard (https://data-apis.org/array-api/2024.12/) and parts of JAX's API, written with primitives.

A function takes arrays of stagec's, NumPy's and Python's numbers, promotes them (`promotion`), and binds primitives, so
that it works in a trace and outside of one alike. `stagec.numpy`, `lax`, `nn` and `random` are the faces.
"""
