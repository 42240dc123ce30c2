"""The persistent Bazel worker: a process that imports what a command needs once, and forks for every request.

Importing is most of a small action's time. The bytes are those of a separate process, and a crash ends only one action.
"""
