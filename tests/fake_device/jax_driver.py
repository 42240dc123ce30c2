"""What JAX imports as a plugin where the driver is a fake: JAX asks the kernel for a device before it starts XLA's."""


def initialize() -> None:
    from jax._src import hardware_utils

    hardware_utils.has_visible_nvidia_gpu = lambda: True
    hardware_utils.num_available_amd_gpus = lambda **_: 1
