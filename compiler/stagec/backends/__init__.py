"""Backends: a target's description turned into XLA options and canonical executable bytes."""
