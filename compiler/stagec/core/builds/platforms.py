"""The platforms: their names, and the libraries that compile for them and run on them.

To add one, write a row here and the class of its targets in `specs`, and these modules: `hardware.NAME` for what
is checked in of its devices, `manifest.NAME` for the table of a manifest (GPUs: a class in `manifest.gpu`),
`backends.NAME.compiler` for the compiler, or a vendor's module in `backends.gpu`.
`python tools/platforms.py --write` writes the rules' table. The loader and the compilers take plugins from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import util


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
    plugins: those that compile for it, each for another release of the vendor's libraries; none for CPUs, for which
        jaxlib itself compiles.
    nodes: files of the kernel, as patterns below /dev; one exists if the machine has a device.
    pci: vendor and devices by their numbers on the PCI bus, if the files say too little; "" and none otherwise.
    compiler: the folder of `backends` with its compiler; "" for one of its name.
    """

    name: str
    device: str
    listed: str
    catalog: str
    plugins: Sequence[Plugin] = ()
    nodes: Sequence[str] = ()
    pci: tuple[str, frozenset[str]] = ("", frozenset())
    compiler: str = ""

    @property
    def plugin(self) -> Plugin | None:
        """The first of its plugins that is installed; the first one, if none is."""
        several = self.plugins if len(self.plugins) > 1 else ()
        return next(filter(_is_installed, several), next(iter(self.plugins), None))

    @property
    def files(self) -> tuple[str, ...]:
        """The libraries that compile for it, one of them, below a folder of packages."""
        if not self.plugins:
            return ("jaxlib/libjax_common.so",)
        return tuple(f"{plugin.package.replace('.', '/')}/{plugin.library}" for plugin in self.plugins)


def _is_installed(plugin: Plugin) -> bool:
    try:
        return util.find_spec(plugin.package) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def _gpu_plugin(platform: str, release: int) -> Plugin:
    """Return the plugin for a release of the vendor's libraries."""
    return Plugin(
        platform,
        package=f"jax_plugins.xla_{platform}{release}",
        library=f"xla_{platform}_plugin.so",
        distribution=f"jax-{platform}{release}-pjrt",
        kernels=f"jax-{platform}{release}-plugin",
    )


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
            [_gpu_plugin("cuda", release) for release in (13, 12)],
            nodes=("nvidia[0-9]*", "dxg"),
            compiler="gpu",
        ),
        Platform(
            "rocm",
            "AMD device",
            "AMD devices",
            "amd.toml",
            [_gpu_plugin("rocm", release) for release in (7, 10)],
            nodes=("kfd",),
            compiler="gpu",
        ),
        Platform(
            "tpu",
            "TPU",
            "TPUs; properties are of one chip, and a target is a slice of them, of any size up to the pod",
            "tpu.toml",
            [Plugin("tpu", "libtpu", "libtpu.so", "libtpu", own_versions=True)],
            # Other devices have /dev/vfio too. The numbers are those of jax/_src/hardware_utils.py, from v3 to tpu7x.
            nodes=("accel[0-9]*", "vfio/[0-9]*"),
            pci=("0x1ae0", frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})),
        ),
    )
}
