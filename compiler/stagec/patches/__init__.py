"""Change XLA's machine code in memory, so that its results do not depend on this machine."""
