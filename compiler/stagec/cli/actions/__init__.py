"""`stagec action NAME`: what Bazel's actions run, and nobody else: a module for each, as in `stagec.cli`.

Each makes one thing, and has only the options that this takes. `preload` of a module imports what its worker keeps.
"""
