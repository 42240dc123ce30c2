"""What JAX imports of the package of a plugin: it registers the fake device as NVIDIA's plugin registers itself."""

from pathlib import Path


def initialize() -> None:
    from jax._src import hardware_utils, xla_bridge

    hardware_utils.has_visible_nvidia_gpu = lambda: True  # JAX asks the kernel first, as stagec does
    xla_bridge.register_plugin("cuda", priority=500, library_path=str(Path(__file__).with_name("xla_cuda_plugin.so")))
