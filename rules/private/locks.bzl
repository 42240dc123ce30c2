"""The packages that a workspace builds with where it names no lock.

The newest JAX needs a newer Python than stagec does. So there are two sets of locks, and the Python decides.
"""

load("//rules/private:python_environment.bzl", "declared_interpreter", "find_python", "watched_path")

# The oldest Python that the newest JAX has wheels for, and the oldest that stagec runs with.
NEWEST_FROM = "3.12"
OLDEST = "3.11"

_FILES = {
    "lock": "requirements.lock",
    "cuda_lock": "cuda.lock",
    "rocm_lock": "rocm.lock",
    "tpu_lock": "tpu.lock",
}
_FOR_ALL = {name: Label("//compiler:" + file) for name, file in _FILES.items()}

# AMD has no plugin of 0.12.0.1: JAX asks for jax-rocm7-plugin==0.12.0.1.*, and there is 0.12.0.
_NEWEST = dict(
    {name: Label("//compiler:newest/" + file) for name, file in _FILES.items()},
    rocm_lock = _FOR_ALL["rocm_lock"],
)

def locked_releases(repository_ctx, lock):
    """The releases of jaxlib that a lock pins; several where it depends on the interpreter.

    Args:
      repository_ctx: the repository rule's context.
      lock: label of a requirements file or a uv.lock.

    Returns:
      list of string.
    """
    releases = {}
    before = ""
    for line in repository_ctx.read(watched_path(repository_ctx, lock)).splitlines():
        if before == 'name = "jaxlib"' and line.startswith('version = "'):  # in a uv.lock
            releases[line.split('"')[1]] = None
        before = line
        name, _, rest = line.partition("==")
        if name.strip() == "jaxlib" and rest:
            releases[rest.split(" ")[0].split(";")[0].rstrip("\\")] = None
    return releases.keys()

def _chosen(repository_ctx):
    """The set with a jaxlib of the workspace's own lock, else the newest that the Python of actions has wheels for."""
    sets = [_NEWEST, _FOR_ALL]
    if repository_ctx.attr.lock:
        own = locked_releases(repository_ctx, repository_ctx.attr.lock)
        fitting = [labels for labels in sets if locked_releases(repository_ctx, labels["lock"])[0] in own]
        if len(fitting) == 1:
            return fitting[0]
    declared = declared_interpreter(repository_ctx.attr)
    version = declared.version or find_python(repository_ctx, declared).version
    numbers, newest = [[int(part) for part in text.split(".")[:2]] for text in [version, NEWEST_FROM]]
    return _NEWEST if numbers >= newest else _FOR_ALL

def _stagec_locks_impl(repository_ctx):
    for name, label in _chosen(repository_ctx).items():
        repository_ctx.file("compiler/" + _FILES[name], repository_ctx.read(watched_path(repository_ctx, label)), executable = False)
    repository_ctx.file("BUILD", "exports_files(%r)\n" % ["compiler/" + file for file in _FILES.values()], executable = False)

_stagec_locks = repository_rule(
    implementation = _stagec_locks_impl,
    doc = "Stagec's own locks for one release of jaxlib: that of `lock`, or the newest that the Python of actions has wheels for.",
    attrs = {
        "lock": attr.label(doc = "The lock of the workspace, if it names one.", allow_single_file = True),
        "interpreter": attr.string(doc = "As python_environment has it."),
        "interpreter_version": attr.string(doc = "As python_environment has it."),
        "python": attr.label(doc = "As python_environment has it.", allow_single_file = True),
    },
    environ = ["STAGEC_PYTHON"],
)

def declare_locks(named, interpreter = "", interpreter_version = "", python = None):
    """Declares `@stagec_locks`, which has a lock where the workspace names none.

    Args:
      named: dict of the labels of those that it names: `lock`, `cuda_lock`, `rocm_lock` and `tpu_lock`; each may be None.
      interpreter: as python_environment has it.
      interpreter_version: as python_environment has it.
      python: as python_environment has it.

    Returns:
      dict with the same keys and a label for each.
    """
    _stagec_locks(
        name = "stagec_locks",
        lock = named.get("lock"),
        interpreter = interpreter,
        interpreter_version = interpreter_version,
        python = python,
    )
    return {name: named.get(name) or Label("@stagec_locks//:compiler/" + file) for name, file in _FILES.items()}
