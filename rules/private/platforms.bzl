"""What Bazel knows of each platform. tools/platforms.py writes this file; do not edit it."""

# What compiles for a platform besides the toolchain. An executable names the one that it needs, and no other, so that
# Bazel fetches a plugin when an executable of its platform is built.
PLUGINS = {
    "cpu": None,
    "cuda": Label("@stagec_cuda//:environment"),
    "tpu": Label("@stagec_tpu//:environment"),
}

# Mnemonics of the actions that compile.
MNEMONICS = {
    "cpu": "StagecCompile",
    "cuda": "StagecCompileCuda",
    "tpu": "StagecCompileTpu",
}

# What planning reads of each platform.
PLANNING = [
    "stagec/hardware/cpu.py",
    "stagec/hardware/cuda.py",
    "stagec/hardware/tpu.py",
    "stagec/manifest/cpu.py",
    "stagec/manifest/cuda.py",
    "stagec/manifest/tpu.py",
    "stagec/targets/cpu.toml",
    "stagec/targets/nvidia.toml",
    "stagec/targets/tpu.toml",
]
