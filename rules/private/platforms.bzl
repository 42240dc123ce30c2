"""What Bazel knows of the compiler. tools/platforms.py writes this file; do not edit it."""

# What compiles for a platform besides the toolchain. An executable names the one that it needs, and no other, so that
# Bazel fetches a plugin when an executable of its platform is built.
PLUGINS = {
    "cpu": None,
    "cuda": Label("@stagec_cuda//:environment"),
    "rocm": Label("@stagec_rocm//:environment"),
    "tpu": Label("@stagec_tpu//:environment"),
}

# Mnemonics of the actions that compile.
MNEMONICS = {
    "cpu": "StagecCompile",
    "cuda": "StagecCompileCuda",
    "rocm": "StagecCompileRocm",
    "tpu": "StagecCompileTpu",
}

# The AMD devices: the name of a rehearsal's target says no platform.
AMD_DEVICES = [
    "mi210",
    "mi250x",
    "mi300a",
    "mi300x",
    "mi325x",
    "mi350x",
    "mi355x",
    "rx7900xtx",
    "rx9070",
]

# What planning reads. A change in one of these files plans every manifest again, and a change in any
# other file of the compiler does not.
PLANNING = [
    "stagec/__init__.py",
    "stagec/__main__.py",
    "stagec/cli/__init__.py",
    "stagec/cli/actions/__init__.py",
    "stagec/cli/actions/plan.py",
    "stagec/cli/files.py",
    "stagec/core/__init__.py",
    "stagec/core/builds/__init__.py",
    "stagec/core/builds/compiler_options.py",
    "stagec/core/builds/extensions.py",
    "stagec/core/builds/frontends.py",
    "stagec/core/builds/naming.py",
    "stagec/core/builds/platforms.py",
    "stagec/core/builds/releases.py",
    "stagec/core/builds/specs.py",
    "stagec/core/builds/version.py",
    "stagec/core/data/__init__.py",
    "stagec/core/data/paths.py",
    "stagec/core/data/reading.py",
    "stagec/core/data/writing.py",
    "stagec/core/faces.py",
    "stagec/core/messages/__init__.py",
    "stagec/core/messages/errors.py",
    "stagec/core/messages/refusal.py",
    "stagec/core/sizes/__init__.py",
    "stagec/core/sizes/avals.py",
    "stagec/core/sizes/expressions.py",
    "stagec/core/sizes/frozen.py",
    "stagec/core/sizes/names.py",
    "stagec/core/sizes/partitions.py",
    "stagec/core/sizes/size.py",
    "stagec/core/trees/__init__.py",
    "stagec/core/trees/same.py",
    "stagec/hardware/__init__.py",
    "stagec/hardware/autotuning.py",
    "stagec/hardware/catalog.py",
    "stagec/hardware/cpu.py",
    "stagec/hardware/cuda.py",
    "stagec/hardware/gpu_devices.py",
    "stagec/hardware/rocm.py",
    "stagec/hardware/tables.py",
    "stagec/hardware/tpu.py",
    "stagec/hardware/tpu_topologies.py",
    "stagec/manifest/__init__.py",
    "stagec/manifest/checks.py",
    "stagec/manifest/cpu.py",
    "stagec/manifest/environment.py",
    "stagec/manifest/gpu.py",
    "stagec/manifest/load.py",
    "stagec/manifest/models.py",
    "stagec/manifest/planning.py",
    "stagec/manifest/schema.py",
    "stagec/manifest/tables.py",
    "stagec/manifest/targets.py",
    "stagec/manifest/toml.py",
    "stagec/manifest/tpu.py",
    "stagec/manifest/values.py",
    "stagec/releases.toml",
    "stagec/targets/amd.toml",
    "stagec/targets/cpu.toml",
    "stagec/targets/nvidia.toml",
    "stagec/targets/tpu.toml",
]

# The variables of actions that change what a command does.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONSAFEPATH": "1",
}
