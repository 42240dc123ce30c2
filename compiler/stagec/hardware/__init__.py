"""Hardware that can be compiled for, described by its figures; none of it is needed. Standard library only."""
