"""The loader: runs bundles with numpy and jaxlib, and nothing of stagec's compiler."""
