"""The persistent worker of Bazel's: a process that imports what a command needs once, and forks for every request."""
