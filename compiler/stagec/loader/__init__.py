"""What loads bundles and calls their functions, where nothing but numpy and jaxlib is installed."""
