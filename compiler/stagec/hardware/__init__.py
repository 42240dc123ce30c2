"""Hardware that can be compiled for, described by its properties; none of it is needed. Standard library only."""
