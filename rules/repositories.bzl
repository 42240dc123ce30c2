"""For WORKSPACE files. (MODULE.bazel files use extensions.bzl.)"""

load("//rules/private:hub_environment.bzl", "declare_environments")
load("//rules/private:isolation.bzl", "isolation_check")
load("//rules/private:jaxlibs.bzl", "declare_jaxlibs")
load("//rules/private:locks.bzl", "declare_locks")
load("//rules/private:manifest.bzl", _stagec_manifest = "stagec_manifest")
load("//rules/private:offline.bzl", _stagec_offline_repositories = "stagec_offline_repositories")
load("//rules/private:python_environment.bzl", "uv_environment", _python_environment = "python_environment")

python_environment = _python_environment
stagec_manifest = _stagec_manifest
stagec_offline_repositories = _stagec_offline_repositories

def stagec_repositories(
        lock = None,
        tpu_lock = None,
        cuda_lock = None,
        rocm_lock = None,
        interpreter = "",
        interpreter_version = "",
        packages = "",
        trimmed = True,
        jaxlibs = {},
        groups = [],
        python = None,
        environment = [],
        cuda_environment = [],
        rocm_environment = [],
        tpu_environment = []):
    """Declares the Python environments that planning and staging run in, and registers the toolchain.

    Bazel downloads the compilers for TPUs, NVIDIA and AMD devices when you build the first executable for them, and
    the packages that sign bundles when you sign one.

    Args:
      lock: label of a requirements file with hashes, or of a uv.lock: jax, jaxlib, numpy, flatbuffers, pydantic, and the
        packages that your models import. Without it, models can import JAX and NumPy, in the newest versions that stagec
        knows for the Python of actions. Without jax, functions are those of
        `frontend = "arrays"`.
      tpu_lock: label of a lock with only libtpu, if you use another jaxlib.
      cuda_lock: label of a lock with jax-cuda13-pjrt, jax-cuda13-plugin, absl-py, nvidia-cuda-nvcc and nvidia-nvvm, if you
        use another jaxlib. For CUDA 12, see docs/accelerators.md.
      rocm_lock: label of a lock with jax-rocm7-pjrt and jax-rocm7-plugin, or ROCm 10's, if you use another jaxlib.
      interpreter: absolute path of the Python that actions run, if it differs from the one that installs the packages,
        such as that of an execution image. This machine need not have it.
      interpreter_version: its version, such as 3.11.9. Actions compare it with the version of their Python.
      packages: absolute path of a folder of that image with what is in `@stagec_python//:layer`. Actions then do not get
        the packages as inputs; they compare the fingerprint.
      trimmed: whether to leave out what no module imports: the packages' own tests, C headers and type stubs.
      jaxlibs: other releases of jaxlib, for manifests with `jaxlib`: dict of names of repositories to dicts with `lock`,
        and optionally `cuda_lock`, `rocm_lock`, `tpu_lock`, `interpreter`, `interpreter_version`, `packages` and `trimmed`, which mean
        the same as here. A lock has jaxlib, numpy and flatbuffers; it needs no JAX. `architecture`: "aarch64" if it
        compiles for that, with `interpreter` where that is, else in Debian's Python 3.11, emulated. `exec_properties`:
        what a remote engine wants to hear of actions that compile with it.
      groups: if `lock` is a uv.lock, the dependency groups and extras of its project to install besides its dependencies.
      python: label of the interpreter that installs all packages and runs stagec, a file of a repository, such as
        "@python_3_12_host//:python" of rules_python. It needs pip. Without it, stagec looks for one on PATH.
      environment: in place of `lock`: list of labels of targets with the packages, such as "@pip//jax" and "@pip//flax" of
        rules_python, or of one that has them in `deps`. They must have flatbuffers, jaxlib, numpy and pydantic, for the
        Python of actions.
      cuda_environment: the same in place of `cuda_lock`.
      rocm_environment: the same in place of `rocm_lock`.
      tpu_environment: the same in place of `tpu_lock`.
    """
    targets = {
        "environment": environment,
        "cuda_environment": cuda_environment,
        "rocm_environment": rocm_environment,
        "tpu_environment": tpu_environment,
    }
    actions = {"interpreter": interpreter, "interpreter_version": interpreter_version, "python": python, "trimmed": trimmed}
    named = {"lock": lock, "cuda_lock": cuda_lock, "rocm_lock": rocm_lock, "tpu_lock": tpu_lock}
    locks = declare_locks(named, interpreter, interpreter_version, python)
    python_environment(name = "stagec_planning", lock = Label("//compiler:planning.lock"), python = python)
    declare_environments(locks, named, targets, packages, groups, actions)
    declare_jaxlibs(locks["lock"], jaxlibs, python, groups, bool(environment))
    python_environment(name = "stagec_serving", lock = Label("//compiler:serving.lock"), python = python)
    python_environment(name = "stagec_cuda_tools", lock = Label("//compiler:cuda_tools.lock"), python = python)
    python_environment(name = "stagec_signing", lock = Label("//compiler:signing.lock"), python = python)
    uv_environment(name = "stagec_uv", python = python)
    isolation_check(name = "stagec_isolation")
    native.register_toolchains("@stagec//compiler:toolchain")
