"""The commands: a module for each, as in `stagec.cli`."""
