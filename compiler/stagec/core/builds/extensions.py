"""The extensions of stagec: what stands beside the core, in distributions of its own.

Each is a folder of compiler/extensions with a Python package. The core imports none of them: it looks a module up here
by its name, when somebody asks for what it has.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType

from stagec.core.messages.errors import StagecError, mistake


@dataclass(frozen=True)
class Extension:
    """A package beside the core.

    name: of its folder in compiler/extensions; `package` is the name of its Python package.
    about: what it does.
    commands: its commands, each a module of `package.commands`, with a sentence for the help. "action NAME" is one that
        only Bazel runs.
    """

    name: str
    about: str
    commands: Mapping[str, str] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """The name of its Python package."""
        return f"stagec_{self.name}"

    @property
    def is_installed(self) -> bool:
        """Whether this process can import it."""
        return importlib.util.find_spec(self.package) is not None

    @property
    def install(self) -> str:
        """What to write to get it. There is no index that has it: somebody else may own its name there."""
        return f"in a clone of stagec, pip install ./compiler/extensions/{self.name}"

    def missing(self, user: str) -> StagecError:
        """Return the error of an extension that is not installed. user: who needs it, such as "stagec push"."""
        return mistake(f"{user} needs the extension {self.name}, which is not installed", self.install)


EXTENSIONS = (
    Extension("arrays", "functions of arrays, traced without JAX"),
    Extension(
        "serve",
        "a server of bundles",
        {
            "serve": "Serve a bundle over HTTP and gRPC with the Open Inference Protocol v2, until SIGTERM.",
        },
    ),
    Extension("grpc", "gRPC, for the server of bundles, and for caches that machines share"),
    Extension(
        "registry",
        "bundles in OCI registries",
        {
            "image": "Write a bundle as an image of a registry, an OCI image layout.",
            "push": "Copy a bundle to a registry, with its weights and with what is said about it.",
            "pull": "Copy a bundle from a registry to a folder, with its weights and with what is said about it.",
        },
    ),
    Extension(
        "insight",
        "pages, profiles and timelines, and what compilers decided for devices",
        {
            "report": "Write a page about a bundle, or about two side by side.",
            "action timeline": "Estimate what a device does when in a call of an executable, as a trace for Perfetto.",
            "profile": "Show where the time of a build went, by actions and phases.",
            "emulate": "Run on CPUs what compilers decided for devices, and compare the results with golden outputs.",
            "autotune": "Time kernels on the NVIDIA devices of this machine, for the targets of a manifest.",
        },
    ),
    Extension(
        "rehearse",
        "programs on devices that are not there",
        {
            "rehearse": "Run a JAX program on devices that are not there, and list all that it compiles.",
            "action program-report": "Write a page about the programs of a rehearsal that were built.",
            "action program-spec": "Write the spec with which to compile the programs of a rehearsal.",
        },
    ),
)

OURS = ("stagec", *(extension.package for extension in EXTENSIONS))
"""The names of all Python packages of stagec."""


def imported(module: str, user: str) -> ModuleType:
    """Import a module of the core or of an extension. Raises StagecError if the extension is not installed.

    user: who needs it, such as "stagec push".
    """
    package = module.partition(".")[0]
    for extension in EXTENSIONS:
        if extension.package == package and not extension.is_installed:
            raise extension.missing(user)
    return importlib.import_module(module)


def folder(package: str, user: str) -> Path:
    """Return the folder of a package, the core's or an extension's. Raises StagecError as `imported` does."""
    return Path(str(imported(package, user).__file__)).parent


@functools.cache
def sources() -> tuple[str, ...]:
    """Return the folders of stagec's own packages, each with a slash at its end: the core's, and installed extensions'.

    A file below them is not the user's.
    """
    specs = (importlib.util.find_spec(extension.package) for extension in EXTENSIONS)
    files = (spec.origin for spec in specs if spec and spec.origin)
    packages = (Path(__file__).parents[2], *(Path(file).parent for file in files))
    return tuple(f"{package.absolute()}{os.sep}" for package in packages)


def hide_frames(error: BaseException) -> None:
    """Leave stagec's own frames out of the traceback of an error that is raised again, as JAX leaves out its own.

    JAX's variable for that shows them: JAX_TRACEBACK_FILTERING=off.
    """
    if os.environ.get("JAX_TRACEBACK_FILTERING") == "off":
        return
    frames, left = [], error.__traceback__
    while left is not None:
        frames.append(left)
        left = left.tb_next
    shown = None
    for entry in reversed(frames):
        if not entry.tb_frame.f_code.co_filename.startswith(sources()):
            shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = shown


def commands() -> list[str]:
    """Return the names of the commands of all extensions."""
    return [command for extension in EXTENSIONS for command in extension.commands]


def of_command(command: str) -> Extension | None:
    """Return the extension that has a command; None: the core has it, or nobody."""
    return next((extension for extension in EXTENSIONS if command in extension.commands), None)
