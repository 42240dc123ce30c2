"""Bundles: exported artifacts and executables of a manifest in one file.

The modules read and write the format with the standard library alone.
"""
