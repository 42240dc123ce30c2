"""The targets that each extension has."""

load("//rules:defs.bzl", "python_library")

def extension(name):
    """Declares an extension: its package, how it is installed, and all of its files.

    Args:
      name: of its folder; the package is `stagec_<name>`.
    """
    python_library(
        name = name,
        srcs = native.glob(["stagec_%s/**" % name], exclude = ["**/__pycache__/**"]),
        imports = ["."],
    )
    native.filegroup(
        name = "project",
        srcs = [
            "README.md",
            "pyproject.toml",
        ],
    )
    native.filegroup(
        name = "distribution",
        srcs = native.glob(
            ["**"],
            exclude = ["**/__pycache__/**"],
        ) + ["//compiler/extensions/%s/tests:distribution" % name],
    )
