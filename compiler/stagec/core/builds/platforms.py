"""The platforms: their names, and the libraries that compile for them and run on them.

To add one, write a row here and the class of its targets in `specs`, and these modules: `hardware.NAME` for what
is checked in of its devices, `manifest.NAME` for the table of a manifest, `backends.NAME.compiler` for the compiler, or
a vendor's module in `backends.gpu`.
`python tools/platforms.py --write` writes the rules' table. The loader and the compilers take plugins from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Plugin:
    """A PJRT plugin: a library in a Python package.

    platform: jaxlib's name of it. package: the package whose folder has the library. library: the file's name.
    distribution: name of the wheel that brings it.
    own_versions: whether the wheel has versions of its own, which `releases` has for each jaxlib, and not jaxlib's.
    kernels: name of the wheel with the parts of JAX that lower kernels for the platform, and with the functions that
        its custom calls name; "" if there is none.
    """

    platform: str
    package: str
    library: str
    distribution: str
    own_versions: bool = False
    kernels: str = ""


@dataclass(frozen=True, eq=False)
class Platform:
    """A platform.

    name: the name in manifests, artifacts and JAX's exports. device: a person's name for one of its devices.
    listed: the heading of its devices in `stagec targets`. catalog: the file of manifests/targets.
    plugin: None for CPUs, for which jaxlib itself compiles.
    nodes: files of the kernel, as patterns below /dev; one exists if the machine has a device.
    pci: vendor and devices by their numbers on the PCI bus, if the files say too little; "" and none otherwise.
    compiler: the folder of `backends` with its compiler; "" for one of its name.
    """

    name: str
    device: str
    listed: str
    catalog: str
    plugin: Plugin | None = None
    nodes: Sequence[str] = ()
    pci: tuple[str, frozenset[str]] = ("", frozenset())
    compiler: str = ""

    @property
    def file(self) -> str:
        """The library that compiles for it, below a folder of packages."""
        if self.plugin is None:
            return "jaxlib/libjax_common.so"
        return f"{self.plugin.package.replace('.', '/')}/{self.plugin.library}"


GPUS = ("cuda", "rocm")
"""The platforms whose executables launch kernels with figures of their own, and whose plugins are XLA:GPU."""
PLATFORMS: Mapping[str, Platform] = {
    platform.name: platform
    for platform in (
        Platform("cpu", "CPU", "CPUs, by the newest instructions that code may use", "cpu.toml"),
        Platform(
            "cuda",
            "NVIDIA device",
            "NVIDIA devices",
            "nvidia.toml",
            Plugin(
                platform="cuda",
                package="jax_plugins.xla_cuda13",
                library="xla_cuda_plugin.so",
                distribution="jax-cuda13-pjrt",
                kernels="jax-cuda13-plugin",
            ),
            nodes=("nvidia[0-9]*", "dxg"),
            compiler="gpu",
        ),
        Platform(
            "rocm",
            "AMD device",
            "AMD devices",
            "amd.toml",
            Plugin(
                platform="rocm",
                package="jax_plugins.xla_rocm7",
                library="xla_rocm_plugin.so",
                distribution="jax-rocm7-pjrt",
                kernels="jax-rocm7-plugin",
            ),
            nodes=("kfd",),
            compiler="gpu",
        ),
        Platform(
            "tpu",
            "TPU",
            "TPUs; properties are of one chip, and a target is a slice of them, of any size up to the pod",
            "tpu.toml",
            Plugin(
                platform="tpu",
                package="libtpu",
                library="libtpu.so",
                distribution="libtpu",
                own_versions=True,
            ),
            # Other devices have /dev/vfio too. The numbers are those of jax/_src/hardware_utils.py, from v3 to tpu7x.
            nodes=("accel[0-9]*", "vfio/[0-9]*"),
            pci=("0x1ae0", frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})),
        ),
    )
}
