"""What reads changed artifacts: each reader returns how it ended, or raises AssertionError for what must not be.

They run in a process of their own, in which jaxlib cannot be imported while bundles and descriptions are read: so what
refuses them is no native code. The process may not crash, and take at most LONGEST seconds and MEMORY bytes for one.
"""

import faulthandler
import multiprocessing
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

LONGEST = 30.0
MEMORY = 4 << 30


def whole_bundle(data: bytes) -> str:
    """Whatever byte was changed, reading all of it refuses."""
    from stagec.runtime.archive import Archive
    from stagec.runtime.refusal import LoadError

    try:
        Archive("x", data).check_all()
    except LoadError as error:
        return f"refused: {error.code}"
    raise AssertionError("a change of bytes was accepted")


def repacked_bundle(data: bytes) -> str:
    """With checksums computed again it is another bundle, which must be one.

    All that it hands out has the digests of its index, its descriptions are read or refused, and it is encoded again as
    the same bytes.
    """
    from stagec.runtime import index
    from stagec.runtime.archive import INDEX, Archive, encode, encode_index, members_table
    from stagec.runtime.refusal import LoadError

    try:
        archive = Archive("x", data)
        members = {name: archive[name] for name in archive.index["members"]}
    except LoadError as error:
        return f"refused: {error.code}"
    table = members_table(members)
    assert archive.index["members"] == table, "a member was handed out that is not what the index says"
    assert encode({INDEX: encode_index(archive.index), **members}) == data, "read, and not the one encoding"
    for artifact, function in archive.index["functions"].items():
        for entry in function["executables"]:
            try:
                index.describe(archive.index, artifact, entry, members[entry["description"]])
            except ValueError:
                return "refused: description"
    return "another bundle"


def description(data: bytes) -> str:
    """It has no digest inside. What is read of a changed one is a whole value: written and read again, an equal one."""
    from stagec.runtime.description import Description

    try:
        found = Description.from_json(data)
    except ValueError:
        return "refused: ValueError"
    assert Description.from_json(found.to_json()) == found, "written and read again, it is another one"
    return "another description"


def export(data: bytes) -> str:
    """The same for a portable artifact."""
    from stagec.stages.exported import Exported, NotExported

    try:
        found = Exported.deserialize(data)
    except NotExported:
        return "refused: NotExported"
    order, vjp = 0, found
    while vjp.has_vjp():
        order, vjp = order + 1, vjp.vjp()
    again = Exported.deserialize(found.serialize(order))
    assert repr(again) == repr(found), "written and read again, it is another one"
    assert again.mlir_module_serialized == found.mlir_module_serialized
    return "another artifact"


Reader = Callable[[bytes], str]


@contextmanager
def in_a_process(reader: Reader) -> Iterator[Reader]:
    """Run a reader in another process, and in a new one after that one ended; raise what it raises.

    Raises BrokenProcessPool when the process ended; faulthandler has then told why.
    """
    pool: ProcessPoolExecutor | None = None

    def read(data: bytes) -> str:
        nonlocal pool
        pool = pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start, (reader,))
        try:
            return pool.submit(_within, reader, data).result()
        except BrokenProcessPool:
            pool = None
            raise

    try:
        yield read
    finally:
        if pool:
            pool.shutdown()


def _start(reader: Reader) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    faulthandler.enable()
    if reader is not export:
        assert not {"jax", "jaxlib", "numpy"} & set(sys.modules)
        sys.meta_path.insert(0, _NoNativeCode())


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


def _within(reader: Reader, data: bytes) -> str:
    """Read within LONGEST seconds; end the process after that."""
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    try:
        return reader(data)
    finally:
        faulthandler.cancel_dump_traceback_later()


class _NoNativeCode:
    """Makes jaxlib unimportable."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in ("jaxlib", "jax", "numpy"):
            raise ImportError(f"{name} is not to be imported here")
