"""Bundles: exported artifacts and executables of a manifest in one file. `stagec.runtime` reads what this writes."""
