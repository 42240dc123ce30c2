"""XLA's compiler for NVIDIA devices, without a device."""
