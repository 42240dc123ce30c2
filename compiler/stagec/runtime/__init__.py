"""The loader: runs bundles with numpy and jaxlib, and nothing of stagec's compiler."""

import os

# Read when jaxlib is loaded: without it XLA lists its devices on stderr. jax sets the same default.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
