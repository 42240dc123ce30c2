"""XLA's compiler for TPUs, without a device."""
