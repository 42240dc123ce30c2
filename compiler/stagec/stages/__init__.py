"""The stages of a build: `Exported`, `Lowered`, `Compiled`. Everything here works without JAX."""

import os

# Read when jaxlib is loaded: without it XLA lists its devices on stderr. jax sets the same default.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
