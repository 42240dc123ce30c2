"""The Python array API standard, written with primitives (https://data-apis.org/array-api/2024.12/).

A function takes arrays of stagec's, NumPy's and Python's numbers, promotes them (`promotion`), and binds primitives, so
that it works in a trace and outside of one alike. `stagec.numpy` is the face.
"""
