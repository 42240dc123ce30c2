"""Pytrees as data: structures, nodes of the model's own types, static values."""
