"""What all frontends use: entries and arguments, a model's code and what it reads, `jit`."""
