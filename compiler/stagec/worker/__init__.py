"""The persistent Bazel worker: a process that imports what a command needs once, and forks for every request."""
