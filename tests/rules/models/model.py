"""A model."""
