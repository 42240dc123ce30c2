"""For MODULE.bazel files. (WORKSPACE files use repositories.bzl.)

    stagec = use_extension("@stagec//rules:extensions.bzl", "stagec")
    stagec.python(lock = "//:requirements.lock")
    stagec.manifest(name = "digits_manifest", manifest = "//examples/digits:digits.toml")
    use_repo(stagec, "digits_manifest")
"""

load("//rules/private:hub_environment.bzl", "declare_environments", "environment_keys")
load("//rules/private:isolation.bzl", "isolation_check")
load("//rules/private:jaxlibs.bzl", "declare_jaxlibs")
load("//rules/private:locks.bzl", "declare_locks")
load("//rules/private:manifest.bzl", "stagec_manifest")
load("//rules/private:python_environment.bzl", "GROUPS", "IMAGE", "python_environment", "uv_environment")

def _stagec_impl(module_ctx):
    named = {}
    actions = {"interpreter": "", "interpreter_version": "", "python": None, "trimmed": True}
    packages = ""
    groups = []
    targets = {key: [] for key in environment_keys()}
    declared = {}
    jaxlibs = {}
    for module in module_ctx.modules:
        if module.is_root:
            if len(module.tags.python) > 1:
                fail("stagec.python is written %d times; the compiler has one environment" % len(module.tags.python))
            for tag in module.tags.python:
                named = {name: getattr(tag, name) for name in ["lock", "cuda_lock", "rocm_lock", "tpu_lock"]}
                packages = tag.packages
                groups = tag.groups
                targets = {key: getattr(tag, key) for key in targets}
                actions = {name: getattr(tag, name) for name in actions}
            jaxlibs = {tag.name: {name: getattr(tag, name) for name in _JAXLIB} for tag in module.tags.jaxlib}
        for tag in module.tags.manifest + module.tags.environment + (module.tags.jaxlib if module.is_root else []):
            if tag.name in declared:
                fail('the modules %s and %s both declare a repository "%s" through stagec; rename one' %
                     (declared[tag.name], module.name, tag.name))
            declared[tag.name] = module.name
        for tag in module.tags.manifest:
            stagec_manifest(name = tag.name, manifest = tag.manifest)
        for tag in module.tags.environment:
            python_environment(
                name = tag.name,
                lock = tag.lock,
                interpreter = tag.interpreter,
                interpreter_version = tag.interpreter_version,
                packages = tag.packages,
                groups = tag.groups,
                python = actions["python"],
                trimmed = tag.trimmed,
            )
    python = actions["python"]
    locks = declare_locks(named, actions["interpreter"], actions["interpreter_version"], python)
    python_environment(name = "stagec_planning", lock = Label("//compiler:planning.lock"), python = python)
    declare_environments(locks, named, targets, packages, groups, actions)
    declare_jaxlibs(locks["lock"], jaxlibs, python, groups, bool(targets["environment"]))
    python_environment(name = "stagec_serving", lock = Label("//compiler:serving.lock"), python = python)
    python_environment(name = "stagec_cuda_tools", lock = Label("//compiler:cuda_tools.lock"), python = python)
    python_environment(name = "stagec_signing", lock = Label("//compiler:signing.lock"), python = python)
    uv_environment(name = "stagec_uv", python = python)
    isolation_check(name = "stagec_isolation")

_PLUGINS = {
    "tpu_lock": attr.label(doc = "A lock with only libtpu, if you use another jaxlib."),
    "cuda_lock": attr.label(
        doc = "A lock with jax-cuda13-pjrt, jax-cuda13-plugin, absl-py, nvidia-cuda-nvcc and nvidia-nvvm, if you use " +
              "another jaxlib. For CUDA 12, see docs/accelerators.md.",
    ),
    "rocm_lock": attr.label(doc = "A lock with jax-rocm7-pjrt and jax-rocm7-plugin, or ROCm 10's, if you use another jaxlib."),
}

_ENVIRONMENTS = {
    "environment": attr.label_list(
        doc = "In place of `lock`: targets with the packages, such as `@pip//jax` and `@pip//flax` of rules_python, or one that " +
              "has them in `deps`. They must have flatbuffers, jaxlib, numpy and pydantic, for the Python of actions.",
    ),
    "cuda_environment": attr.label_list(doc = "The same in place of `cuda_lock`."),
    "rocm_environment": attr.label_list(doc = "The same in place of `rocm_lock`."),
    "tpu_environment": attr.label_list(doc = "The same in place of `tpu_lock`."),
}

_JAXLIB = dict(
    dict(IMAGE, **_PLUGINS),
    lock = attr.label(
        doc = "A requirements file with hashes: jaxlib, numpy and flatbuffers, of this release. It needs no JAX.",
        mandatory = True,
    ),
    architecture = attr.string(
        doc = "\"aarch64\", if it compiles for that: with `interpreter` where that is, else in Debian's Python 3.11, emulated.",
    ),
    exec_properties = attr.string_dict(doc = "What a remote engine wants to hear of actions that compile with it."),
    trimmed = attr.bool(doc = "Whether to leave out what no module imports.", default = True),
)

_jaxlib = tag_class(
    doc = "Another release of jaxlib, which compiles the executables of manifests that name it in `jaxlib`. Only the root " +
          "module's tags count.",
    attrs = dict(_JAXLIB, name = attr.string(doc = "Name of the repository.", mandatory = True)),
)

_environment = tag_class(
    doc = "A Python environment of your own, as `@<name>//:environment`.",
    attrs = dict(
        IMAGE,
        name = attr.string(doc = "Name of the repository.", mandatory = True),
        groups = GROUPS,
        lock = attr.label(doc = "A requirements file with hashes, or a uv.lock.", mandatory = True),
        trimmed = attr.bool(doc = "Whether to leave out what no module imports. Actions on other machines get all files."),
    ),
)

_manifest = tag_class(
    doc = "Plans a manifest. `@<name>//:defs.bzl` then has the macro `aot_manifest`, which declares its targets.",
    attrs = {
        "name": attr.string(doc = "Name of the repository.", mandatory = True),
        "manifest": attr.label(doc = "The manifest, a .toml file.", mandatory = True),
    },
)

_python = tag_class(
    doc = "The packages that the compiler and your models import. Bazel downloads the compilers for TPUs, NVIDIA " +
          "and AMD devices when you build the first executable for them. Only the root module's tag counts.",
    attrs = dict(
        dict(dict(IMAGE, **_PLUGINS), **_ENVIRONMENTS),
        groups = GROUPS,
        python = attr.label(
            doc = "The interpreter that installs all packages and runs stagec, a file of a repository, such as " +
                  "`@python_3_12_host//:python` of rules_python. It needs pip. Without it, stagec looks for one on PATH.",
        ),
        trimmed = attr.bool(
            doc = "Whether to leave out what no module imports: the packages' own tests, C headers and type stubs.",
            default = True,
        ),
        lock = attr.label(
            doc = "A requirements file with hashes, or a uv.lock: jax, jaxlib, numpy, flatbuffers, pydantic, and the packages " +
                  "that your models import. Without it, models can import JAX and NumPy, in the newest versions that stagec knows for " +
                  "the Python of actions. Without jax, functions are those of `frontend = \"arrays\"`.",
        ),
    ),
)

stagec = module_extension(
    implementation = _stagec_impl,
    doc = "Declares Python environments and manifests.",
    tag_classes = {"environment": _environment, "jaxlib": _jaxlib, "manifest": _manifest, "python": _python},
)
