"""A build without Bazel: the actions of a manifest, the workers that do them, and a store of what they made.

`actions` says what a build does, as the rules say it to Bazel. `store` keeps what was made, and `running` does the
rest, with the workers that Bazel has.
"""
