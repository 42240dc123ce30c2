"""Bundles in OCI registries: images, layers, what refers to them, push and pull."""
