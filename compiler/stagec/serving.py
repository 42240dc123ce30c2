"""Loading a bundle: the loader, tied to the compiler that it falls back to.

The loader runs what was compiled, and knows no compiler. It is handed one here, which is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.runtime.archive import Archive
from stagec.runtime.executable import Executable
from stagec.runtime.loader import Bundle
from stagec.runtime.node_types import Types
from stagec.runtime.refusal import CallError, LoadError
from stagec.runtime.selection import Policy, Shapes
from stagec.runtime.signature import Convention, Interface

if TYPE_CHECKING:
    from stagec.runtime.signatures import Key


def load(
    path: str | Path,
    target: str | None = None,
    types: Types | None = None,
    *,
    policy: Policy = "allow_compile",
    devices: Sequence[Any] = (),
    keys: Sequence[Key] = (),
    threshold: int = 1,
    signature: str | Path | None = None,
    map_weights: bool = True,
) -> Bundle:
    """Load a bundle (`name.aot`).

    target: which of the bundle's targets to run; None takes, for each function, the most demanding one that runs here.
    types: the model's own types that results are made of: classes (namedtuples, dataclasses, flax's and equinox's), or
        a mapping from the name that a type is registered under for serialization to the class or a `PyTreeNode`. A type
        that is not there becomes a dict of its fields, or a tuple of its children where it is not known by fields.
        None: those that this process has, because it has imported their module or has registered them with JAX. The
        loader itself imports neither a module of the model nor JAX.
    policy: "allow_compile" runs the executables that fit, and where none does compiles the portable artifact at the
        first call, with jaxlib alone, for the shapes that the executables are for; "executable_only" never compiles.
    devices: of one platform, as `stagec.devices` lists them. A function of n devices runs on the first n, in this
        order. Empty: those of the platform.
    keys: the public keys that are trusted: paths of PEM files, or their bytes. With any, the bundle must be signed, and
        that is checked before anything of it is parsed.
    threshold: how many of the keys must have signed.
    signature: path of the envelope with the signatures; None: `<path>.dsse.json`.
    map_weights: whether the arrays of bound arguments are mapped from the file: on CPUs processes then share them, and
        nobody may write into the file as long as one has it open. False reads them into memory of this process's own.
    Raises LoadError with a code when the file is missing, damaged, of another format, or has nothing for this machine
    (docs/troubleshooting.md). The digest of what is read is checked before anything parses it; executables are read and handed
    to XLA at their first call. What XLA raises then, or in a call, has a note with the lines of the model, where
    `<manifest>.<function>.debug.mlir` is beside the bundle and no keys are given: nobody signs that file.
    """
    if keys:
        from stagec.runtime import signatures

        archive = signatures.open_signed(path, keys, threshold, signature)
    else:
        archive = Archive(path)
    return Bundle(
        archive, target, types, policy, devices, compile_exported, locations=not keys, map_weights=map_weights
    )


def explain(path: str | Path, target: str | None = None, policy: Policy = "allow_compile") -> Bundle:
    """Return a bundle as `load` does, although nothing of it may run here: for its `select` and `selections`.

    Raises LoadError when the file is missing, damaged or of another format.
    """
    return Bundle(Archive(path), target, None, policy, (), compile_exported, selected_only=False)


def compile_exported(
    serialized: bytes, platform: str, shapes: Shapes, devices: Sequence[Any]
) -> tuple[Convention, Executable]:
    """Compile a serialized `Exported` for arguments of these shapes, and load it on `devices` of `platform`.

    Raises CallError ("shape") when the shapes do not fit, LoadError ("compile") when it cannot be read or compiled.
    """
    try:
        from stagec.backends.compilation import CannotCompile
        from stagec.stages.compiled import load_lowered
        from stagec.stages.exported import Exported, NotExported
        from stagec.stages.lowered import CannotLower, SizesDoNotFit, lower_exported
    except ImportError as error:  # Bazel's library of the loader, //compiler:runtime, has no compiler
        raise LoadError("compile", f"the portable artifact cannot be compiled here: {error}") from error
    try:
        exported = Exported.deserialize(serialized)
        lowered = lower_exported(exported, platform, exported.sizes(shapes))
        executable = load_lowered(lowered, {}, devices[: lowered.nr_devices])
    except SizesDoNotFit as error:
        raise CallError("shape", str(error)) from error
    except (ImportError, NotExported, CannotLower, CannotCompile) as error:
        raise LoadError("compile", f"the portable artifact cannot be compiled here: {error}") from error
    flat = lowered.in_tree, lowered.flat_in_avals, lowered.out_tree, lowered.flat_out_avals
    return Interface(*flat, lowered.kept_var_idx, lowered.donated), executable
