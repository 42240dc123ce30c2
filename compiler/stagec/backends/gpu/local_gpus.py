"""The GPUs of this machine: describe one. XLA needs the driver for it. Nothing that is built needs a device."""

from __future__ import annotations

import functools
from typing import Any

from stagec.backends import plugins
from stagec.backends.compilation import CannotCompile
from stagec.core.builds.platforms import GPUS
from stagec.pjrt import accelerators


def prepare_process() -> None:
    """Prepare this process to use devices; must run before jaxlib is imported. CUDA_VISIBLE_DEVICES chooses them."""
    plugins.prepare_process({"TF_CPP_MIN_LOG_LEVEL": "3", "XLA_FLAGS": ""}, ("XLA_", "PJRT_", "TF_"))


def describe_device() -> str:
    """Return XLA's description of the first GPU of this machine, for `descriptions.properties`.

    CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES decides the first one. Raises CannotCompile when there is none, or no
    plugin.
    """
    prepare_process()
    return described(devices(next((platform for platform in GPUS if not accelerators.refusal(platform)), "cuda"))[0])


@functools.cache
def devices(platform: str = "cuda") -> tuple[Any, ...]:
    """Return jaxlib's objects for a vendor's devices of this machine. Raises CannotCompile when there is none."""
    plugins.load(plugins.of(platform))
    from jaxlib import _jax, xla_client

    options: dict[str, str | bool] = {"preallocate": False, **({"platform_name": "ROCM"} if platform == "rocm" else {})}
    try:
        client = xla_client.make_c_api_client(platform, options)
    except _jax.JaxRuntimeError as error:
        driver, device = ("ROCm", "an AMD") if platform == "rocm" else ("CUDA", "an NVIDIA")
        write = f"run this on a machine with {device} device and its driver"
        raise CannotCompile(f"{driver} finds no device here: {error}", write=write) from error
    return tuple(client.local_devices())


def described(device: Any) -> str:
    """Return XLA's description of one of `devices`, for `descriptions.properties`."""
    from jaxlib import xla_client

    return str(xla_client.get_topology_for_devices([device]).target_config)
