"""Avals, and the sizes of their dimensions."""
