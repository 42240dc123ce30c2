"""The vocabulary that all packages share, on the standard library alone."""
