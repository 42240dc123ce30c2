"""JAX's frontend: a function that JAX traces to an Exported, and `stagec.jit` of such a function."""
