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

_BUILD = """load("@stagec//rules/private:python_environment.bzl", "environment")

environment(
    name = "environment",
    fingerprint = "fingerprint.txt",
    interpreter = %r,
    packages = "packages.json",
    site_packages = "site-packages",
    version = %r,
    visibility = ["//visibility:public"],
)
"""

# What the installer ends with where the index has no wheel for this machine.
_NO_WHEEL = 3

def _install(repository_ctx, lock, display, uv = [], more = ""):
    """Installs a lock into the repository.

    Args:
      repository_ctx: the repository rule's context.
      lock: path of the lock.
      display: what messages call it.
      uv: the installer's words about uv; without, pip installs.
      more: what the BUILD file has besides.

    Returns:
      struct of problem, a message or "", and whether that is that the index has no wheel for this machine.
    """
    installer = watched_path(repository_ctx, repository_ctx.attr._installer)
    for module in repository_ctx.attr._installer_modules:
        watched_path(repository_ctx, module)
    python = _find_python(repository_ctx)
    doing = "looking for the wheels of %s" % display
    for step in ["choose", "install", "compile"]:
        if hasattr(repository_ctx, "report_progress"):
            repository_ctx.report_progress(doing)
        result = repository_ctx.execute(
            [python.command, "-B", "-E", installer, lock, display, "--step", step] + uv,
            timeout = 3600,
        )
        if result.return_code != 0:
            return struct(
                problem = result.stdout.strip() or result.stderr.strip() or "installing %s did not end" % display,
                no_wheel = result.return_code == _NO_WHEEL,
            )
        doing = result.stdout.strip()
    note = repository_ctx.read("note.txt").strip()
    if note:
        print(note)
    repository_ctx.file("interpreter.txt", python.interpreter + "\n", executable = False)
    repository_ctx.file("BUILD", _BUILD % (python.interpreter, python.version) + more, executable = False)
    return struct(problem = "", no_wheel = False)

def _python_environment_impl(repository_ctx):
    lock = watched_path(repository_ctx, repository_ctx.attr.lock)
    problem = repository_ctx.path(repository_ctx.attr._uv)
    without = repository_ctx.read(problem).strip()
    uv = ["--without-uv", without] if without else ["--uv", problem.dirname.get_child("uv")]
    installed = _install(repository_ctx, lock, workspace_path(repository_ctx.attr.lock), uv)
    if installed.problem:
        fail(installed.problem)

_INSTALLER = {
    "_installer": attr.label(default = Label("//rules/private:python_environment.py")),
    "_installer_modules": attr.label_list(
        default = [Label("//rules/private:" + module) for module in [
            "byte_code.py",
            "pip_installer.py",
            "pip_settings.py",
            "uv_installer.py",
        ]],
    ),
}

python_environment = repository_rule(
    implementation = _python_environment_impl,
    doc = "Installs a locked set of Python packages, byte-compiled, for the first Python 3.11 or newer on PATH " +
          "(python3 before others), or the one that STAGEC_PYTHON names. Rules take `@<name>//:environment`.",
    attrs = dict(
        _INSTALLER,
        lock = attr.label(
            doc = "A requirements file in which every package is pinned and hashed.",
            mandatory = True,
            allow_single_file = True,
        ),
        _uv = attr.label(default = Label("@stagec_uv//:problem.txt")),
    ),
    environ = ["STAGEC_PYTHON"],
)

def _uv_environment_impl(repository_ctx):
    lock = watched_path(repository_ctx, repository_ctx.attr._lock)
    files = "\nexports_files([\"problem.txt\", \"uv\"])\n"
    installed = _install(repository_ctx, lock, workspace_path(repository_ctx.attr._lock), more = files)
    if installed.problem and not installed.no_wheel:
        fail(installed.problem)
    repository_ctx.file("problem.txt", installed.problem.split("\n")[0], executable = False)
    if installed.no_wheel:
        # pip installs the packages of other environments.
        repository_ctx.file("uv", "", executable = False)
        repository_ctx.file("empty.lock", "", executable = False)
        _install(repository_ctx, repository_ctx.path("empty.lock"), "empty.lock", more = files)
    else:
        repository_ctx.symlink("site-packages/bin/uv", "uv")

uv_environment = repository_rule(
    implementation = _uv_environment_impl,
    doc = "Installs uv, which installs the packages of other environments. Where the index has none for this machine, " +
          "`problem.txt` says so.",
    attrs = dict(
        _INSTALLER,
        _lock = attr.label(default = Label("//compiler:installer.lock"), allow_single_file = True),
    ),
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
