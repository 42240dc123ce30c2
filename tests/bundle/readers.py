"""What reads changed artifacts: each reader returns how it ended, or raises AssertionError for what must not be.

They call what the commands call, in a process of their own. One may take at most MEMORY bytes, and by its size the
seconds of the processor that BUDGETS says. In most of these processes jaxlib cannot be imported: so what refuses is no
native code, and the process may not crash. Those of NATIVE are what a command calls in a child process, which jaxlib
may end: that is a refusal, too.
"""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

LONGEST = 30.0
MEMORY = 4 << 30


@contextmanager
def _on_disk(data: bytes, suffix: str = "") -> Iterator[str]:
    """A file with these bytes, by its path."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(data)
        file.flush()
        yield file.name


def whole_bundle(data: bytes) -> str:
    """Whatever byte was changed, reading all of it refuses."""
    from stagec.bundle.archive import Archive
    from stagec.core.messages.refusal import LoadError

    try:
        Archive("x", data).check_all()
    except LoadError as error:
        return f"refused: {error.code}"
    raise AssertionError("a change of bytes was accepted")


def repacked_bundle(data: bytes) -> str:
    """With checksums computed again it is another bundle, which must be one.

    All that it hands out has the digests of its index, its descriptions are read or refused, and it is encoded again as
    the same bytes. It is inspected, and what is stripped of it is a bundle.
    """
    from stagec.audit import inspection
    from stagec.bundle import index
    from stagec.bundle.archive import Archive
    from stagec.bundle.members import bundle_members, encode, members_table
    from stagec.bundle.writing import strip
    from stagec.core.messages.errors import StagecError
    from stagec.core.messages.refusal import LoadError

    try:
        archive = Archive("x", data)
        members = {name: archive[name] for name in archive.index["members"]}
        archive.check_all()
    except LoadError as error:
        return f"refused: {error.code}"
    table = members_table(members)
    assert archive.index["members"] == table, "a member was handed out that is not what the index says"
    assert encode(bundle_members(archive.index, members)) == data, "read, and not the one encoding"
    Archive("x", encode(strip(archive))).check_all()
    with _on_disk(data) as path, contextlib.suppress(StagecError):
        inspection.as_text(inspection.inspect(path))
    for artifact, function in archive.index["functions"].items():
        for entry in function["executables"]:
            try:
                index.describe(archive.index, artifact, entry, members[entry["description"]])
            except ValueError:
                return "refused: description"
    return "another bundle"


def explained_bundle(data: bytes) -> str:
    """What `explain` tells of such a bundle, and `diff` of it and itself."""
    from stagec.audit import comparison
    from stagec.core.messages.errors import StagecError
    from stagec.core.messages.refusal import LoadError
    from stagec.loader import load

    with _on_disk(data, ".aot") as path:
        try:
            for selection in load.explain(path).selections():
                selection.as_text()
        except LoadError as error:
            return f"refused: {error.code}"
        try:
            comparison.as_text(comparison.compare(path, path))
        except StagecError:
            return "refused: StagecError"
        except LoadError as error:  # the command line prints it as it is
            return f"refused: {error.code}"
    return "another bundle"


def description(data: bytes) -> str:
    """It has no digest inside. What is read of a changed one is a whole value: written and read again, an equal one."""
    from stagec.audit.inspection import as_text
    from stagec.bundle.description import Description

    try:
        found = Description.from_json(data)
    except ValueError:
        return "refused: ValueError"
    written = found.to_json()
    assert Description.from_json(written) == found, "written and read again, it is another one"
    as_text(json.loads(written))
    return "another description"


def export(data: bytes) -> str:
    """What `inspect` tells of an exported artifact; written and read again, it is the same one."""
    from stagec.audit import inspection
    from stagec.stages.exported import Exported

    try:
        found = Exported.deserialize(data)
    except ValueError:
        return "refused: ValueError"
    order, vjp = 0, found
    while vjp.has_vjp():
        order, vjp = order + 1, vjp.vjp()
    again = Exported.deserialize(found.serialize(order))
    assert repr(again) == repr(found), "written and read again, it is another one"
    assert again.mlir_module_serialized == found.mlir_module_serialized
    try:
        inspection.as_text(inspection.exported(data))
    except ValueError:
        return "refused: its module"
    except RuntimeError:  # of nanobind's: a name that is not UTF-8. It ends the child process
        return "refused: its module"
    return "another artifact"


def located(data: bytes) -> str:
    """What `locate` tells of a module with source locations."""
    from stagec.stages import locations

    try:
        locations.located(data, "INVALID_ARGUMENT: at %tanh.5 = f32[3]{0} tanh(%x)")
    except ValueError:
        return "refused: ValueError"
    except RuntimeError:
        return "refused: RuntimeError"
    return "another module"


KEY = bytes(range(32))
"""A private key; it signed the envelope."""


def envelope(data: bytes) -> str:
    """Whatever was changed, the key signed the statement that it signed before, or none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from stagec.core.messages.refusal import LoadError
    from stagec.trust.attestation import Statement, signed_by
    from stagec.trust.dsse import Envelope

    try:
        found = Envelope.from_json(data)
    except ValueError:
        return "refused: ValueError"
    public = Ed25519PrivateKey.from_private_bytes(KEY).public_key()
    try:
        Statement.read(found.payload, "x")
    except LoadError:
        return "refused: statement"
    return "the same statement" if signed_by(found, {"key": public}) else "refused: signature"


def statement(data: bytes) -> str:
    """It is refused, or has subjects with digests."""
    from stagec.core.messages.refusal import LoadError
    from stagec.trust.attestation import Statement

    try:
        found = Statement.read(data, "x")
    except LoadError as error:
        return f"refused: {error.code}"
    assert all(len(bytes.fromhex(digest)) == 32 for digest in found.subjects.values())
    return "another statement"


def weights(data: bytes) -> str:
    """A safetensors file is refused, or has arrays of the bytes that they say."""
    from stagec.bundle import safetensors
    from stagec.core.sizes.avals import num_bytes

    with _on_disk(data) as path:
        try:
            found = safetensors.read(path)
        except ValueError:
            return "refused: ValueError"
        assert all(len(tensor.read()) == num_bytes(tensor.aval) for tensor in found.values())
    return "other weights"


def manifest(data: bytes) -> str:
    """A manifest is planned, or refused with all that is wrong with it."""
    from stagec.core.messages.errors import StagecError
    from stagec.manifest import load_manifest, plan

    with _on_disk(data) as path:
        try:
            plan(load_manifest(path, "m.toml"))
        except StagecError:
            return "refused: StagecError"
    return "another plan"


Reader = Callable[[bytes], str]
NATIVE = (export, located)
WITH_JAXLIB = (*NATIVE, explained_bundle)
BUDGETS: dict[Reader, tuple[float, float]] = {manifest: (2.0, 40e-6), explained_bundle: (2.0, 20e-6)}
"""Seconds of the processor for any size, and for a byte. Planning writes a spec for a few bytes."""
BUDGET = (0.5, 5e-6)


@contextmanager
def in_a_process(reader: Reader) -> Iterator[Reader]:
    """Run a reader in another process, and in a new one after that one ended; raise what it raises.

    Raises BrokenProcessPool when the process ended, unless the reader is one of NATIVE; faulthandler has then told why.
    """
    pool: ProcessPoolExecutor | None = None

    def read(data: bytes) -> str:
        nonlocal pool
        pool = pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start, (reader,))
        try:
            return pool.submit(_within, reader, data).result()
        except BrokenProcessPool:
            pool = None
            if reader in NATIVE:
                return "refused: jaxlib ended"
            raise

    try:
        yield read
    finally:
        if pool:
            pool.shutdown()


def _start(reader: Reader) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if reader not in NATIVE:
        faulthandler.enable()
    if reader not in WITH_JAXLIB:
        assert not {"jax", "jaxlib", "numpy"} & set(sys.modules)
        sys.meta_path.insert(0, _NoNativeCode())


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


def _within(reader: Reader, data: bytes) -> str:
    """Read within the reader's budget; end the process after LONGEST seconds, a tenth of that for native code."""
    native = reader in NATIVE
    faulthandler.dump_traceback_later(LONGEST / 10 if native else LONGEST, exit=True)
    started = time.process_time()
    try:
        return reader(data)
    finally:
        faulthandler.cancel_dump_traceback_later()
        taken, (fixed, a_byte) = time.process_time() - started, BUDGETS.get(reader, BUDGET)
        if not native:
            assert taken < fixed + a_byte * len(data), f"{taken:.1f} s for {len(data):,} bytes"


class _NoNativeCode:
    """Makes jaxlib unimportable."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in ("jaxlib", "jax", "numpy"):
            raise ImportError(f"{name} is not to be imported here")
