"""Bundles: exported artifacts and executables of a manifest in one file. It writes and reads the format, on the standard library alone."""
