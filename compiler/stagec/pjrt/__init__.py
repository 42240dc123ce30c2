"""Run XLA: clients, arrays, executables and their calls. It imports only numpy and jaxlib."""
