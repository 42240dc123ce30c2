"""A locked set of Python packages as a repository, and the rule that hands it to other rules.

The packages are one input of an action, a directory, with their digest as another. Thousands of files would cost each
action 0.2 to 0.3 s, and a tree artifact half of that. Bazel before 8.5 does not look into a directory: the digest stands
for what is in it.
"""

load("//rules:providers.bzl", "InterpreterInfo", "PythonEnvironmentInfo")

# The interpreter imports what its command line names and nothing else: no .pyc files are written (-B), and neither the
# user's (-s) nor the machine's own packages (-S) are seen.
INTERPRETER_FLAGS = ["-B", "-s", "-S"]

_MINIMUM = (3, 11)
_ON_PATH = ["python3", "python3.14", "python3.13", "python3.12", "python3.11"]

# Prints the version, the path of the interpreter itself (neither a link to it nor a virtual environment's), its ABI and
# whether it has pip.
_PROBE = "; ".join([
    "import importlib.machinery, importlib.util, os, platform, sys",
    "print(platform.python_version())",
    "print(os.path.realpath(sys.executable))",
    "print(importlib.machinery.EXTENSION_SUFFIXES[0].split('.')[1])",
    "print(importlib.util.find_spec('pip') is not None)",
])

def workspace_path(label):
    """A label's file as its user knows it: the path inside its repository.

    Args:
      label: label of a source file.

    Returns:
      string.
    """
    return label.package + "/" + label.name if label.package else label.name

def watched_path(repository_ctx, label):
    """The path of a label's file; when the file changes, the repository is made again.

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

_NONE_DECLARED = struct(interpreter = "", version = "", packages = "")

def declared_interpreter(attr):
    """What is where actions run.

    Args:
      attr: attributes of a repository rule: interpreter and interpreter_version, and packages where it has that.

    Returns:
      struct of interpreter, version and packages; each is "" where it is what is here.
    """
    interpreter, version, packages = attr.interpreter, attr.interpreter_version, getattr(attr, "packages", "")
    if packages and not packages.startswith("/"):
        fail("packages = %r is not an absolute path; write the folder where actions run, such as /opt/stagec" % packages)
    if interpreter and not interpreter.startswith("/"):
        fail("interpreter = %r is not an absolute path; write the one where actions run, such as /opt/python/bin/python3.11" %
             interpreter)
    if bool(interpreter) != bool(version) or version and len(version.split(".")) != 3:
        fail(("interpreter = %r, interpreter_version = %r: write both, or none; the version has three numbers, " +
              "such as 3.11.9, as the interpreter prints it for --version") % (interpreter, version))
    return struct(interpreter = interpreter, version = version, packages = packages)

def _release_line(version):
    return ".".join(version.split(".")[:2])

def _probe(repository_ctx, path, declared):
    """Asks one interpreter what it is: a struct, or a string that says why it will not do."""
    result = repository_ctx.execute([path, "-E", "-c", _PROBE])
    lines = result.stdout.splitlines()
    if result.return_code != 0 or len(lines) != 4:
        return "%s: does not run" % path
    version = lines[0]
    major, minor = [int(part) for part in version.split(".")[:2]]
    if (major, minor) < _MINIMUM:
        return "%s: Python %s, too old" % (path, version)
    if declared.version and _release_line(declared.version) != _release_line(version):
        return "%s: Python %s; packages are for the Python %s that actions run" % (path, version, declared.version)
    if lines[3] != "True":
        return "%s: Python %s has no pip (Debian: apt-get install python3-pip)" % (path, version)
    if hasattr(repository_ctx, "watch"):
        repository_ctx.watch(lines[1])  # another release in its place: the packages are installed again
    return struct(command = path, version = version, interpreter = lines[1], abi = lines[2])

def find_python(repository_ctx, declared):
    """The interpreter to install with.

    Args:
      repository_ctx: the context of a repository rule with the attribute python.
      declared: struct, as `declared_interpreter` returns it.

    Returns:
      struct of command (what runs pip), version, interpreter (the path of itself) and abi.
    """
    rejected = []
    if repository_ctx.attr.python:
        probed = _probe(repository_ctx, str(repository_ctx.path(repository_ctx.attr.python)), declared)
        if type(probed) != type(""):
            return probed
        rejected = ["python = \"%s\": %s" % (repository_ctx.attr.python, probed)]
        if not declared.version:  # another jaxlib may have another Python, which may be on PATH
            fail(rejected[0])
    named = repository_ctx.os.environ.get("STAGEC_PYTHON")
    minimum, names, paths = "%d.%d or newer" % _MINIMUM, _ON_PATH, []
    if declared.version:
        minimum = _release_line(declared.version)
        names = ["python" + minimum] + names
        there = declared.interpreter and repository_ctx.path(declared.interpreter).exists
        paths = [declared.interpreter] if there else []
    if not named or declared.version:  # another jaxlib may have a Python that the variable does not name
        paths += [repository_ctx.which(name) for name in names]
    if named:
        paths = [repository_ctx.which(named) if "/" not in named else named] + paths
    for path in paths:
        if not path:
            continue
        probed = _probe(repository_ctx, str(path), declared)
        if type(probed) != type(""):
            return probed
        if probed not in rejected:
            rejected.append(probed)
    how = "declare the path of one as interpreter, with interpreter_version" if declared.version else "name one: STAGEC_PYTHON=/path/to/python3"
    fail("\n  ".join(
        ["no Python %s with pip was found" % minimum] +
        (rejected or [named + ": no such program" if named else "there is no python3 on PATH"]) +
        ["install one, or " + how],
    ))

_BUILD = """load("@stagec//rules/private:python_environment.bzl", "environment")
{environments}
# What an execution image may have.
genrule(
    name = "layer",
    srcs = ["fingerprint.txt", "site-packages"],
    outs = ["layer.tar"],
    cmd = "tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --dereference --format=gnu" +
          " --directory=$$(dirname $(location fingerprint.txt)) --create --file=$@ fingerprint.txt site-packages",
    tags = ["manual"],
)
"""

def environment_target(**attributes):
    """What declares an `environment` in a BUILD file.

    Args:
      **attributes: its attributes.

    Returns:
      string.
    """
    lines = ["    %s = %r,\n" % (name, value) for name, value in attributes.items()]
    return "\nenvironment(\n%s    visibility = [\"//visibility:public\"],\n)\n" % "".join(lines)

# An environment with a library that stagec does not know has its packages in a target of their own: an action examines
# them, and the environment of other actions has the row.
EXAMINED = """load("@stagec//rules/private:examination.bzl", "examined_jaxlib", "examined_plugin")
"""
EXAMINED_JAXLIB = """
examined_jaxlib(
    name = "examined_cpu",
    environment = ":packages",
)
"""
EXAMINED_PLUGIN = """
examined_plugin(
    name = "examined_{platform}",
    environment = {environment},
    platform = "{platform}",
    plugin = ":packages",
)
"""

_ANOTHER_PYTHON = """
  there may be wheels for another Python (of jaxlib from 0.11 on: for 3.12 and newer); declare one that is on this machine:
  interpreter = "/opt/python3.12/bin/python3.12", interpreter_version = "3.12.1", beside this lock"""

_FOR_AARCH64 = """
  jaxlib from 0.11 on has none for Debian's Python 3.11, which compiles for aarch64: build with an older one,
  lock = "@stagec//compiler:requirements.lock", or declare a Python for aarch64 (docs/aarch64.md)"""

# What the installer ends with where the index has no wheel for this machine.
_NO_WHEEL = 3

def _install(repository_ctx, lock, display, declared, uv = [], more = "", architecture = "", emulated = None):
    """Installs a lock into the repository.

    Args:
      repository_ctx: the repository rule's context.
      lock: path of the lock.
      display: what messages call it.
      declared: struct of interpreter, version and packages: what is where actions run; "": what is here.
      uv: the installer's words about uv; without, pip installs.
      more: what the BUILD file has besides.
      architecture: that of the packages; "": of this machine.
      emulated: label of the Python that runs them, or None.

    Returns:
      struct of problem, a message or "", and whether that is that the index has no wheel for this machine.
    """
    installer = watched_path(repository_ctx, repository_ctx.attr._installer)
    for module in repository_ctx.attr._installer_modules:
        watched_path(repository_ctx, module)
    python = find_python(repository_ctx, declared)
    options = ["--trimmed"] if getattr(repository_ctx.attr, "trimmed", True) else []
    options += ["--release", declared.version] if declared.version else []
    options += ["--architecture", architecture] if architecture else []
    options += ["--groups=" + group for group in getattr(repository_ctx.attr, "groups", [])]
    if hasattr(repository_ctx.attr, "_version"):
        # Of stagec's files, this one and its table of builds alone are watched: an edit of another takes time at the
        # start of a process, and not an installation of all packages.
        options += ["--stagec", watched_path(repository_ctx, repository_ctx.attr._version).dirname.dirname.dirname]
        watched_path(repository_ctx, repository_ctx.attr._known_builds)
    doing = "looking for the wheels of %s" % display
    for step in ["choose", "install", "compile"]:
        if hasattr(repository_ctx, "report_progress"):
            repository_ctx.report_progress(doing)
        result = repository_ctx.execute(
            [python.command, "-B", "-E", installer, lock, display, "--step", step] + options + uv,
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
    implementation, tag, here, system = python.abi.split("-", 3)
    attributes = dict(
        abi = "-".join([implementation, tag, architecture or here, system]),
        emulated = str(emulated) if emulated else None,
        execution_interpreter = declared.interpreter,
        execution_packages = declared.packages,
        execution_version = declared.version,
        fingerprint = "fingerprint.txt",
        interpreter = python.interpreter,
        packages = "packages.json",
        site_packages = "site-packages",
        version = python.version,
    )

    # An emulator starts no other processes, which an examination does.
    unknown = [] if emulated else repository_ctx.read("unknown.txt").splitlines()
    examined = [":examined_" + platform for platform in unknown]
    environments = environment_target(name = "environment", examined = examined, **attributes)
    if unknown:
        jaxlib = getattr(repository_ctx.attr, "jaxlib", "")
        of_plugins = repr("@%s//:environment" % jaxlib) if jaxlib else None
        environments = EXAMINED + environment_target(name = "packages", **attributes) + "".join([
            EXAMINED_JAXLIB if one == "cpu" else EXAMINED_PLUGIN.format(platform = one, environment = of_plugins)
            for one in unknown
        ]) + environments
    repository_ctx.file("BUILD", _BUILD.format(environments = environments) + more, executable = False)
    return struct(problem = "", no_wheel = False)

def _python_environment_impl(repository_ctx):
    declared = declared_interpreter(repository_ctx.attr)
    architecture = repository_ctx.attr.architecture
    emulated = repository_ctx.attr.emulated if not declared.interpreter else None
    if emulated:
        declared = struct(interpreter = "", version = repository_ctx.attr.emulated_version, packages = "")
    lock = watched_path(repository_ctx, repository_ctx.attr.lock)
    problem = repository_ctx.path(repository_ctx.attr._uv)
    without = repository_ctx.read(problem).strip()
    uv = ["--without-uv", without] if without else ["--uv", problem.dirname.get_child("uv")]
    display = workspace_path(repository_ctx.attr.lock)
    installed = _install(repository_ctx, lock, display, declared, uv, "", architecture, emulated)
    if installed.problem:
        # pip names jax first, which wants the same Python as jaxlib, and uv names both.
        of_jax = "jax==" in installed.problem or "jaxlib" in installed.problem
        advice = _FOR_AARCH64 if emulated and of_jax else _ANOTHER_PYTHON
        fail(installed.problem + (advice if installed.no_wheel else ""))

_PYTHON = attr.label(
    doc = "The interpreter that installs the packages and runs actions, a file of a repository, such as " +
          "`@python_3_12_host//:python` of rules_python. It needs pip. Without it, one is looked for on PATH.",
    allow_single_file = True,
)

_ELSEWHERE = {
    "interpreter": attr.string(
        doc = "The absolute path of the Python that actions run, if it differs from the one that installs the " +
              "packages, such as that of an execution image. This machine need not have it.",
    ),
    "interpreter_version": attr.string(
        doc = "Its version, such as 3.11.9. Actions compare it with the version of their Python. Python 3.11 of any release " +
              "installs the packages.",
    ),
}

IMAGE = dict(
    _ELSEWHERE,
    packages = attr.string(
        doc = "The absolute path of a folder of that image with what is in `//:layer` of the environment's repository, such " +
              "as `@stagec_python//:layer`. Actions then do not get the packages as inputs; they compare the fingerprint.",
    ),
)

INTERPRETER = dict(_ELSEWHERE, python = _PYTHON)

GROUPS = attr.string_list(
    doc = "If `lock` is a uv.lock: dependency groups and extras of its project to install, besides its dependencies.",
)

_INSTALLER = {
    "python": _PYTHON,
    "_installer": attr.label(default = Label("//rules/private:python_environment.py")),
    "_installer_modules": attr.label_list(
        default = [Label("//rules/private:" + module) for module in [
            "byte_code.py",
            "installed_files.py",
            "pip_installer.py",
            "pip_settings.py",
            "uv_installer.py",
            "uv_lock.py",
        ]],
    ),
}

python_environment = repository_rule(
    implementation = _python_environment_impl,
    doc = "Installs a locked set of Python packages, byte-compiled, for `python`, or the first Python 3.11 or newer on PATH " +
          "(python3 before others), or the one that STAGEC_PYTHON names. Rules take `@<name>//:environment`.",
    attrs = dict(
        dict(_INSTALLER, **IMAGE),
        lock = attr.label(
            doc = "A requirements file in which every package is pinned and hashed, or a uv.lock.",
            mandatory = True,
            allow_single_file = True,
        ),
        groups = GROUPS,
        trimmed = attr.bool(
            doc = "Whether to leave out what no module imports: the packages' own tests, C headers and type stubs. What " +
                  "actions import is: each of them has all files as inputs.",
        ),
        architecture = attr.string(
            doc = "The architecture of packages and interpreter, as `uname -m` has it, where it is not this machine's.",
        ),
        emulated = attr.label(doc = "A Python of that architecture and what runs it, where `interpreter` names none."),
        emulated_version = attr.string(doc = "Its version."),
        _uv = attr.label(default = Label("@stagec_uv//:problem.txt")),
        jaxlib = attr.string(
            doc = "Of a plugin: the name of the repository with the jaxlib that compiles with it, if that is not the toolchain's.",
        ),
        _known_builds = attr.label(default = Label("//compiler:stagec/patches/known_builds.json")),
        _version = attr.label(default = Label("//compiler:stagec/core/builds/version.py")),
    ),
    environ = ["STAGEC_PYTHON"],
)

def _uv_environment_impl(repository_ctx):
    lock = watched_path(repository_ctx, repository_ctx.attr._lock)
    files = "\nexports_files([\"problem.txt\", \"uv\"])\n"
    installed = _install(repository_ctx, lock, workspace_path(repository_ctx.attr._lock), _NONE_DECLARED, more = files)
    if installed.problem and not installed.no_wheel:
        fail(installed.problem)
    repository_ctx.file("problem.txt", installed.problem.split("\n")[0], executable = False)
    if installed.no_wheel:
        # pip installs the packages of other environments.
        repository_ctx.file("uv", "", executable = False)
        repository_ctx.file("empty.lock", "", executable = False)
        _install(repository_ctx, repository_ctx.path("empty.lock"), "empty.lock", _NONE_DECLARED, more = files)
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
            execution_interpreter = ctx.attr.execution_interpreter or ctx.attr.interpreter,
            execution_version = ctx.attr.execution_version or ctx.attr.version,
            execution_packages = ctx.attr.execution_packages,
            emulated = ctx.attr.emulated[InterpreterInfo] if ctx.attr.emulated else None,
            abi = ctx.attr.abi,
            site_packages = ctx.file.site_packages,
            fingerprint = ctx.file.fingerprint,
            examined = ctx.files.examined,
            packages = ctx.file.packages,
        ),
    ]

environment = rule(
    implementation = _environment_impl,
    doc = "An installed set of Python packages. python_environment declares it in the repositories that it makes.",
    attrs = {
        "abi": attr.string(doc = "The ABI that the packages are for, such as cpython-311-x86_64-linux-gnu."),
        "emulated": attr.label(
            doc = "A program instead of both, which runs an interpreter of another architecture.",
            providers = [InterpreterInfo],
        ),
        "examined": attr.label_list(
            doc = "The rows of libraries that stagec does not know (examination.bzl).",
            allow_files = [".json"],
            cfg = "exec",
        ),
        "execution_interpreter": attr.string(doc = "Absolute path of the one that actions run; \"\": `interpreter`."),
        "execution_packages": attr.string(doc = "Absolute path of the packages' folder there; \"\": they are inputs."),
        "execution_version": attr.string(doc = "Its full version; \"\": `version`."),
        "fingerprint": attr.label(doc = "Digest of the packages and the ABI.", allow_single_file = True),
        "interpreter": attr.string(doc = "Absolute path of the interpreter that installed them."),
        "packages": attr.label(doc = "The list of the packages' wheels.", allow_single_file = True),
        "site_packages": attr.label(doc = "The folder of the packages.", allow_single_file = True),
        "version": attr.string(doc = "Its full version."),
    },
)
