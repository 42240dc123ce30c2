"""A locked set of Python packages as a repository, and the rule that hands it to other rules."""

load("//rules:providers.bzl", "PythonEnvironmentInfo")

# The interpreter imports what its command line names and nothing else: no .pyc files are written (-B), and neither the
# user's (-s) nor the machine's own packages (-S) are seen.
INTERPRETER_FLAGS = ["-B", "-s", "-S"]

_MINIMUM = (3, 11)
_ON_PATH = ["python3", "python3.14", "python3.13", "python3.12", "python3.11"]

# Prints the version, the path of the interpreter itself (neither a link to it nor a virtual environment's) and whether
# it has pip.
_PROBE = "; ".join([
    "import importlib.util, os, platform, sys",
    "print(platform.python_version())",
    "print(os.path.realpath(sys.executable))",
    "print(importlib.util.find_spec('pip') is not None)",
])

def workspace_path(label):
    """A label's file as its user knows it: the path inside of its repository.

    Args:
      label: label of a source file.

    Returns:
      string.
    """
    return label.package + "/" + label.name if label.package else label.name

def watched_path(repository_ctx, label):
    """The path of a label's file; when the file changes, the repository is made anew.

    Args:
      repository_ctx: the repository rule's context.
      label: label of a source file.

    Returns:
      path.
    """
    path = repository_ctx.path(label)
    if hasattr(repository_ctx, "watch"):
        repository_ctx.watch(path)
    return path

def _probe(repository_ctx, path):
    """Asks one interpreter what it is: a struct, or a string that says why it will not do."""
    result = repository_ctx.execute([path, "-E", "-c", _PROBE])
    lines = result.stdout.splitlines()
    if result.return_code != 0 or len(lines) != 3:
        return "%s: does not run" % path
    version = lines[0]
    major, minor = [int(part) for part in version.split(".")[:2]]
    if (major, minor) < _MINIMUM:
        return "%s: Python %s, too old" % (path, version)
    if lines[2] != "True":
        return "%s: Python %s has no pip (Debian: apt-get install python3-pip)" % (path, version)
    return struct(command = path, version = version, interpreter = lines[1])

def _find_python(repository_ctx):
    """The interpreter to use: a struct with the command that runs pip, the version and the resolved interpreter."""
    named = repository_ctx.os.environ.get("STAGEC_PYTHON")
    if named:
        paths = [repository_ctx.which(named) if "/" not in named else named]
    else:
        paths = [repository_ctx.which(name) for name in _ON_PATH]
    rejected = []
    for path in paths:
        if not path:
            continue
        found = _probe(repository_ctx, str(path))
        if type(found) != type(""):
            return found
        if found not in rejected:
            rejected.append(found)
    fail("\n  ".join(
        ["no Python 3.11 or newer with pip was found"] +
        (rejected or [named + ": no such program" if named else "there is no python3 on PATH"]) +
        ["install one, or name one: STAGEC_PYTHON=/path/to/python3"],
    ))

def _python_environment_impl(repository_ctx):
    installer = watched_path(repository_ctx, repository_ctx.attr._installer)
    lock = watched_path(repository_ctx, repository_ctx.attr.lock)
    python = _find_python(repository_ctx)
    result = repository_ctx.execute(
        [python.command, "-E", "-P", installer, lock, workspace_path(repository_ctx.attr.lock)],
        timeout = 3600,
    )
    if result.return_code != 0:
        fail(result.stdout.strip() or result.stderr.strip() or "installing %s did not end" % lock)
    repository_ctx.file("interpreter.txt", python.interpreter + "\n", executable = False)
    repository_ctx.file("BUILD", """load("@stagec//rules/private:python_environment.bzl", "environment")

environment(
    name = "environment",
    fingerprint = "fingerprint.txt",
    interpreter = %r,
    packages = "packages.json",
    site_packages = "site-packages",
    version = %r,
    visibility = ["//visibility:public"],
)
""" % (python.interpreter, python.version), executable = False)

python_environment = repository_rule(
    implementation = _python_environment_impl,
    doc = "Installs a locked set of Python packages, byte-compiled, for the first Python 3.11 or newer on PATH " +
          "(python3 before others), or the one that STAGEC_PYTHON names. Rules take `@<name>//:environment`.",
    attrs = {
        "lock": attr.label(
            doc = "A requirements file in which every package is pinned and hashed.",
            mandatory = True,
            allow_single_file = True,
        ),
        "_installer": attr.label(default = Label("//rules/private:python_environment.py")),
    },
    environ = ["STAGEC_PYTHON"],
)

def _environment_impl(ctx):
    return [
        # The digest alone stands for the packages in the key of a worker: Bazel 4 cannot distinguish directories there.
        DefaultInfo(
            files = depset([ctx.file.fingerprint]),
            runfiles = ctx.runfiles(files = [ctx.file.site_packages, ctx.file.fingerprint]),
        ),
        PythonEnvironmentInfo(
            interpreter = ctx.attr.interpreter,
            version = ctx.attr.version,
            site_packages = ctx.file.site_packages,
            fingerprint = ctx.file.fingerprint,
            packages = ctx.file.packages,
        ),
    ]

environment = rule(
    implementation = _environment_impl,
    doc = "An installed set of Python packages. python_environment declares it in the repositories that it makes.",
    attrs = {
        "fingerprint": attr.label(doc = "Digest of the packages and the interpreter.", allow_single_file = True),
        "interpreter": attr.string(doc = "Absolute path of the interpreter."),
        "packages": attr.label(doc = "The list of the packages' wheels.", allow_single_file = True),
        "site_packages": attr.label(doc = "The folder of the packages.", allow_single_file = True),
        "version": attr.string(doc = "The interpreter's full version."),
    },
)
