"""A build without Bazel: the actions of a manifest, done by the workers that Bazel keeps, and a store of what they made.

`actions` says what a build does, as the rules say it to Bazel; `store` keeps what was made; `running` does what is not
kept.
"""
