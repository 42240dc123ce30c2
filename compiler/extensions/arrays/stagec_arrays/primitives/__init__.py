"""The table of primitives: each operation with its rule of shapes, its lowering and its derivative, in one place.

Functions here take arrays of the dtypes that the operation has, and promote nothing; those of elements broadcast.
"""
