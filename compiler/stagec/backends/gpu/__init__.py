"""XLA's compiler for GPUs of NVIDIA and AMD, without a device."""
