"""Loading a bundle: the loader, tied to the compiler that it falls back to.

The loader only runs executables: it does not import the compiler. This module gives it one, and imports that only when
it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stagec.bundle.archive import Archive
from stagec.core.messages.refusal import CallError, LoadError
from stagec.loader.bundle import Bundle
from stagec.loader.loaded import Settings
from stagec.loader.selection import Policy, Shapes
from stagec.pjrt.calling_convention import Convention, Interface
from stagec.pjrt.executable import Executable

if TYPE_CHECKING:
    from stagec.bundle.external import Check
    from stagec.core.trees.node_types import Types
    from stagec.trust.keys import Key


def load(
    path: str | os.PathLike[str],
    target: str | None = None,
    types: Types | None = None,
    *,
    policy: Policy = "allow_compile",
    devices: Sequence[Any] = (),
    keys: Sequence[Key] | None = None,
    threshold: int = 1,
    signature: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    map_weights: bool = True,
    weights: str | os.PathLike[str] | None = None,
    check_weights: Check = "load",
) -> Bundle:
    """Load a bundle (`name.aot`).

    target: which of the bundle's targets to run. None: for each function, the most demanding one that runs here.
    types: the classes that results may have, as classes or as objects (whose static parts results may have too); or a
        mapping from the name under which a type is registered for serialization to the class or a `PyTreeNode`. Any
        other type becomes a plain container (docs/loading.md has a table). None: the types that this process has,
        because it imported their module or registered them with JAX. The loader does not import modules of the model,
        and does not import JAX.
    policy: "allow_compile" runs the executables that fit. If none fits, it compiles the exported artifact at the first
        call, with jaxlib, for the shapes that the bundle has executables for. "executable_only" never compiles.
        "measured" and "measured_only" are the same two, and take what an older jaxlib made too, where its operations
        were measured to have the same bits with this one (docs/loading.md). This jaxlib's own comes first.
    devices: of one platform, as `stagec.devices` or `jax.devices` lists them. A function for n devices runs on the
        first n, in this order. Empty: those of the platform; for a call with JAX's arrays, JAX's.
    keys: the public keys that you trust: paths of PEM files, or their bytes. If you give them, the bundle must be
        signed, and the loader checks this before it parses anything. None: no signature is checked. The loader refuses
        an empty list, and `threshold` or `signature` without keys, because it would check nothing.
    threshold: how many of the keys must have signed.
    signature: path of the envelope with the signatures, or several. None: `<path>.dsse.json`, `<path>.2.dsse.json` and
        so on.
    map_weights: map the arrays of bound arguments from the file. On CPUs, processes then share them, and nobody may
        write into the file while a process has it open. False: read them into memory.
    weights: the folder with the files of weights that are not in the bundle. None: the bundle's folder.
    check_weights: when to compare these files with the digests in the bundle. "load": now. "use": when a call first
        takes an array of the file. "never": compare only sizes, if another program has checked the digests.

    Raises LoadError with a code if the file is missing, damaged, of another format, or has nothing for this machine
    (docs/troubleshooting.md). The loader checks the digest of everything before it parses it. What the bundle says of a
    function is checked when you first ask for it: `bundle[NAME]` may raise LoadError. An executable is read, and handed
    to XLA, at the first call. If XLA raises an error then, or in a call, the error has a note with the
    lines of the model, if `<manifest>.<function>.debug.mlir` is beside the bundle and you gave no keys: that file is
    not signed.

    >>> import numpy as np
    >>> with stagec.load("model.aot") as bundle:
    ...     params = {"w": np.ones((16, 4), np.float32), "b": np.zeros(4, np.float32)}
    ...     y = bundle["mlp"](params, np.ones((1, 16), np.float32))
    >>> y.shape
    (1, 4)
    """
    path = os.fspath(path)
    if keys is None and (threshold != 1 or signature is not None):
        raise LoadError("key", f"{path}: no key is given; say which ones you trust: keys=[...]")
    if keys is not None:
        from stagec.trust import attestation

        given = [signature] if isinstance(signature, str | os.PathLike) else signature or ()
        archive = attestation.open_signed(path, keys, threshold, [os.fspath(file) for file in given])
    else:
        archive = Archive(path)
    files = None
    if archive.index["weights_files"]:
        from stagec.bundle.external import Files  # most bundles have none, and do not wait for it

        files = Files(archive.path, archive.index, None if weights is None else os.fspath(weights), check_weights)
        files.open()
    locations = keys is None
    settings = Settings(target, types, policy, tuple(devices), compile_exported, True, locations, map_weights, files)
    return Bundle(archive, settings)


def explain(path: str | os.PathLike[str], target: str | None = None, policy: Policy = "allow_compile") -> Bundle:
    """Return a bundle as `load` does, although nothing of it may run here: for its `select` and `selections`.

    Raises LoadError when the file is missing, damaged or of another format.
    """
    settings = Settings(target, policy=policy, compiler=compile_exported, selected_only=False)
    return Bundle(Archive(os.fspath(path)), settings)


def compile_exported(
    serialized: bytes, platform: str, shapes: Shapes, devices: Sequence[Any]
) -> tuple[Convention, Executable]:
    """Compile a serialized `Exported` for arguments of these shapes, and load it on `devices` of `platform`.

    Raises CallError ("shape") when the shapes do not fit, LoadError ("compile") when it cannot be read or compiled.
    """
    try:
        from stagec.backends.compilation import CannotCompile
        from stagec.stages.compiling import load
        from stagec.stages.errors import CannotLower, NotExported, SizesDoNotFit
        from stagec.stages.exported import Exported
        from stagec.stages.lowering import lower_exported
    except ImportError as error:  # Bazel's library of the loader, //compiler:runtime, has no compiler
        raise LoadError("compile", f"the exported artifact cannot be compiled here: {error}") from error
    try:
        exported = Exported.deserialize(serialized)
        lowered = lower_exported(exported, platform, exported.sizes(shapes))
        executable, _ = load(lowered, {}, devices[: lowered.nr_devices])
    except SizesDoNotFit as error:
        raise CallError("shape", str(error)) from error
    except (ImportError, NotExported, CannotLower, CannotCompile) as error:
        raise LoadError("compile", f"the exported artifact cannot be compiled here: {error}") from error
    flat = lowered.in_tree, lowered.flat_in_avals, lowered.out_tree, lowered.flat_out_avals
    return Interface(*flat, lowered.kept_var_idx, lowered.donated), executable
