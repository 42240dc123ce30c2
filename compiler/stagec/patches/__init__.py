"""Changes to the machine code of XLA in memory, which make it forget the machine that it runs on."""
