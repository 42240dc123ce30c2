"""The frontend of manifests and of `stagec.jit`: a function of arrays to an Exported."""
