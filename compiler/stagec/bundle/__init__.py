"""Bundles: exported artifacts and executables of a manifest in one file.

What reads and what writes the format, on the standard library alone.
"""
