"""Rehearsals: run a JAX program that nobody changed on devices that are not there, and list all that it compiled."""

FOLDER = "STAGEC_REHEARSAL"
"""The variable with the folder in which a program's processes write what they compile."""
