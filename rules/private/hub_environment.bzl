"""Environments of the packages that another rule set installs, such as `@pip//jax` of rules_python, in place of locks.

An action collects them into one folder. Bazel knows each file of it, so it needs no repository rule and no lock.
"""

load("//rules/private:python_environment.bzl", "EXAMINED", "EXAMINED_JAXLIB", "EXAMINED_PLUGIN", "INTERPRETER", "INTERPRETER_FLAGS", "declared_interpreter", "environment_target", "find_python", "python_environment")
load("//rules/private:python_library.bzl", "python_imports", "sources_of")

# The repository of each environment, and what its packages must be among; of a|b one. The first is the toolchain's.
_REPOSITORIES = {
    "": ("stagec_python", ["flatbuffers", "jaxlib", "numpy", "pydantic"]),
    "cuda": ("stagec_cuda", ["jax-cuda13-pjrt|jax-cuda12-pjrt", "jax-cuda13-plugin|jax-cuda12-plugin"]),
    "rocm": ("stagec_rocm", ["jax-rocm7-pjrt|jax-rocm10-pjrt", "jax-rocm7-plugin|jax-rocm10-plugin"]),
    "tpu": ("stagec_tpu", ["libtpu"]),
}

def environment_keys():
    """The keys of a workspace that name targets of packages: `environment`, and that of each plugin."""
    return [_key(platform, "environment") for platform in _REPOSITORIES]

def _key(platform, name):
    return platform + "_" + name if platform else name

def declare_environments(locks, named, targets, packages, groups, actions):
    """Declares the toolchain's environment and those of plugins.

    Args:
      locks: dict of labels: `lock`, `cuda_lock`, `rocm_lock` and `tpu_lock`.
      named: those of them that the workspace names.
      targets: dict of `environment_keys` to lists of labels; the empty list: the lock is installed.
      packages: as python_environment has it, of the toolchain's.
      groups: the same.
      actions: dict of the attributes python, interpreter, interpreter_version and trimmed of python_environment.
    """
    for platform, (repository, needs) in _REPOSITORIES.items():
        lock, key = _key(platform, "lock"), _key(platform, "environment")
        own = {} if platform else {"groups": groups, "packages": packages}
        if not targets[key]:
            python_environment(name = repository, lock = locks[lock], **dict(own, **actions))
            continue
        given = [name for name, value in dict(own, **{lock: named.get(lock)}).items() if value]
        if given:
            fail("%s and %s are both written: packages are those of a hub or of a lock; leave one out" % (key, given[0]))
        hub_environment(
            name = repository,
            # In this repository's BUILD file, // would be that repository.
            targets = ["@" + label if label.startswith("//") else label for label in [str(one) for one in targets[key]]],
            platform = platform,
            needs = needs,
            **actions
        )

_BUILD = """load("@stagec//rules/private:hub_environment.bzl", "collected_packages")
load("@stagec//rules/private:python_environment.bzl", "environment")

collected_packages(
    name = "collected",
    interpreter = {interpreter},
    needs = {needs},
    packages = {targets},
    trimmed = {trimmed},
    version = {version},
)

[filegroup(
    name = group,
    srcs = [":collected"],
    output_group = group,
) for group in ["fingerprint", "list"]]
"""

def _hub_environment_impl(repository_ctx):
    declared = declared_interpreter(repository_ctx.attr)
    python = find_python(repository_ctx, declared)
    attributes = dict(
        abi = python.abi,
        execution_interpreter = declared.interpreter,
        execution_version = declared.version,
        fingerprint = ":fingerprint",
        interpreter = python.interpreter,
        packages = ":list",
        site_packages = ":collected",
        version = python.version,
    )

    # Which libraries these are is known when an action has collected them: the row of a known one is empty.
    platform = repository_ctx.attr.platform
    examined = EXAMINED_PLUGIN.format(platform = platform, environment = None) if platform else EXAMINED_JAXLIB
    repository_ctx.file("BUILD", "".join([
        EXAMINED,
        _BUILD.format(
            interpreter = repr(declared.interpreter or python.interpreter),
            needs = repr(repository_ctx.attr.needs),
            targets = repr(repository_ctx.attr.targets),
            trimmed = repository_ctx.attr.trimmed,
            version = repr(declared.version or python.version),
        ),
        environment_target(name = "packages", **attributes),
        examined,
        environment_target(name = "environment", examined = [":examined_" + (platform or "cpu")], **attributes),
    ]), executable = False)
    repository_ctx.file("interpreter.txt", python.interpreter + "\n", executable = False)

hub_environment = repository_rule(
    implementation = _hub_environment_impl,
    doc = "Declares `@<name>//:environment` of targets with installed packages. The interpreter is found as by python_environment.",
    attrs = dict(
        INTERPRETER,
        targets = attr.string_list(doc = "The labels of the targets.", mandatory = True),
        platform = attr.string(doc = "Of a plugin: the platform that it compiles for."),
        needs = attr.string_list(doc = "Packages that must be among them; `a|b`: either."),
        trimmed = attr.bool(doc = "As python_environment has it."),
    ),
    environ = ["STAGEC_PYTHON"],
)

def _collected_packages_impl(ctx):
    name = ctx.label.name
    folder = ctx.actions.declare_directory(name + "/site-packages")
    fingerprint = ctx.actions.declare_file(name + "/fingerprint.txt")
    packages = ctx.actions.declare_file(name + "/packages.json")
    files = sources_of(ctx.attr.packages)
    start = ctx.actions.args()
    start.add_all([ctx.file._start, ctx.attr.interpreter] + INTERPRETER_FLAGS + [ctx.file._collector])
    arguments = ctx.actions.args()
    arguments.add("--output=" + folder.path)
    arguments.add_all(ctx.attr.needs, format_each = "--needs=%s")
    if ctx.attr.trimmed:
        arguments.add("--trimmed")
    arguments.add_all(files)
    arguments.use_param_file("@%s", use_always = True)
    arguments.set_param_file_format("multiline")
    ctx.actions.run(
        mnemonic = "StagecPackages",
        progress_message = "Collecting the Python packages of %s" % ctx.label,
        executable = "/bin/sh",
        arguments = [start, arguments],
        inputs = depset(ctx.files._modules + [ctx.file._start, ctx.file._collector], transitive = [files]),
        outputs = [folder, fingerprint, packages],
        env = {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", "STAGEC_PYTHON_VERSION": ctx.attr.version},
        execution_requirements = {"block-network": "1"},
    )
    return [
        DefaultInfo(files = depset([folder])),
        OutputGroupInfo(fingerprint = depset([fingerprint]), list = depset([packages])),
    ]

collected_packages = rule(
    implementation = _collected_packages_impl,
    doc = "One folder with the packages of targets. hub_environment declares it in the repositories that it makes.",
    attrs = {
        "packages": attr.label_list(doc = "The targets, of any rule set.", aspects = [python_imports]),
        "interpreter": attr.string(doc = "Absolute path of the Python that actions run."),
        "version": attr.string(doc = "Its full version, which byte code depends on."),
        "needs": attr.string_list(doc = "Packages that must be among them."),
        "trimmed": attr.bool(doc = "As python_environment has it."),
        "_collector": attr.label(default = Label("//rules/private:collected_packages.py"), allow_single_file = True),
        "_modules": attr.label(default = Label("//rules/private:lock"), allow_files = True),
        "_start": attr.label(default = Label("//rules/private:start.sh"), allow_single_file = True),
    },
)
