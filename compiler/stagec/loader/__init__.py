"""The loader: it loads bundles and calls their functions. It needs only numpy and jaxlib."""
