"""The stages of a build: `Exported`, `Lowered`, `Compiled`. Everything here works without JAX."""

import stagec.pjrt  # noqa: F401 - before jaxlib: it keeps XLA from listing its devices
