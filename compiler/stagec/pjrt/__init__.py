"""What runs XLA: clients, arrays, executables and how they are called. It imports numpy and jaxlib alone."""

import os

# Read when jaxlib is loaded: without it XLA lists its devices on stderr. jax sets the same default.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
