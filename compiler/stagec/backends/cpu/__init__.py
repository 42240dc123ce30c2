"""XLA's compiler for CPUs, with the same bytes on every machine."""
