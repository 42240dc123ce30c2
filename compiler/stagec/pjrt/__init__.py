"""What runs XLA: clients, arrays, executables and how they are called. It imports numpy and jaxlib alone."""
