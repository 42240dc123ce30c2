"""What loads bundles and calls their functions, where nothing but numpy and jaxlib is installed."""

import stagec.pjrt  # noqa: F401 - before jaxlib: it keeps XLA from listing its devices
