"""Several processes that run one program: how this one joins the others.

jaxlib's own runtime, as `jax.distributed` uses it: one process serves the coordinator, over which all of them exchange
their devices and notice that one is gone. Arrays go from process to process by gloo or MPI, or by the accelerator.
"""

from __future__ import annotations

import atexit
import operator
import os
import socket
import threading
import time
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxlib import _jax, xla_client

from stagec.core.messages.refusal import LoadError
from stagec.pjrt import clients, turns
from stagec.pjrt.accelerators import Job

Collectives: TypeAlias = Literal["gloo", "mpi"]

_LONG = 10**8
"""Seconds. XLA ends the process when its own timeouts for joining are over, so it gets some that are never over."""

_LISTENING: dict[str, Any] = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}

_COUNTS = "stagec/num_processes/"
"""Where each process says its `num_processes` to the others."""

_BEGUN: list[str] = []
"""The coordinator that this process joined, or tried to: jaxlib joins once."""


class _Coordinator(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def distributed(
    coordinator: str,
    process_id: int,
    num_processes: int,
    *,
    num_cpu_devices: int = 1,
    collectives: Collectives = "gloo",
    initialization_timeout: int = 300,
    heartbeat_timeout_seconds: int = 100,
) -> None:
    """Join the processes that run functions together; `devices` then lists the devices of all of them.

    As `jax.distributed.initialize` does (https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html).
    Call it before anything that needs a device, in every process, with the same arguments but `process_id`. It returns
    when all have come. In a process that called JAX's function, do not call it: stagec uses JAX's devices there.

    coordinator: host and port, such as "10.0.0.1:1234", where process 0 listens and all others reach it. With a
        loopback address process 0 listens on that alone. Nothing protects the port: keep it inside your network.
    process_id: the number of this process, from 0.
    num_processes: the number of processes.
    num_cpu_devices: the number of devices of this process's CPU.
    collectives: the library that carries arrays between CPUs: "gloo", or "mpi" if MPITRAMPOLINE_LIB names a wrapped MPI
        library.
    initialization_timeout: the seconds to wait for the others.
    heartbeat_timeout_seconds: the seconds without a sign of life before a process counts as dead. XLA then ends
        the others.

    Raises LoadError ("distributed") for arguments that do not fit, or not to those of the others, when the others do
    not come in time, and if this process has used a device or joined others before; LoadError ("device-count").

    >>> stagec.distributed("127.0.0.1:29500", process_id=0, num_processes=1, num_cpu_devices=2)
    >>> [device.process_index for device in stagec.devices("cpu")]
    [0, 0]
    """
    where = _checked(coordinator, process_id, num_processes, num_cpu_devices, collectives)
    _refuse_if_begun(where)
    _BEGUN.append(str(where))
    deadline = time.monotonic() + initialization_timeout
    service = None
    if process_id == 0:
        service = _serve(where, num_processes, heartbeat_timeout_seconds)
    runtime = _jax.get_distributed_runtime_client(
        str(where), process_id, init_timeout=_LONG, heartbeat_timeout=heartbeat_timeout_seconds, use_compression=True
    )
    _connect(runtime, where, num_processes, deadline, initialization_timeout)
    atexit.register(_leave, runtime, service)
    runtime.key_value_set(f"{_COUNTS}{process_id}", str(num_processes))
    try:
        with turns.for_this_machine():
            cpu = xla_client.make_cpu_client(
                distributed_client=runtime,
                node_id=process_id,
                num_nodes=num_processes,
                collectives=_carrier(collectives, runtime, where),
                num_devices=num_cpu_devices,
            )
    except _jax.JaxRuntimeError as error:
        raise _refused(f"the processes at {where} do not agree on their devices: {error}") from error
    _check_counts(runtime, where)
    clients.join(Job(runtime, process_id, num_processes), cpu)


def _checked(
    coordinator: object, process_id: object, num_processes: object, num_cpu_devices: object, collectives: object
) -> _Coordinator:
    """Return the coordinator's address. Raises LoadError."""
    host, _, port = coordinator.rpartition(":") if isinstance(coordinator, str) else ("", "", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise _refused(f'coordinator is {coordinator!r}; write a host and a port, for example "10.0.0.1:1234"')
    number, count, cpus = map(_whole, (process_id, num_processes, num_cpu_devices))
    if count is None or count < 1:
        raise _refused(f"num_processes is {num_processes!r}; write how many processes there are, 1 or more")
    if number is None or not 0 <= number < count:
        numbers = "0" if count == 1 else f"a number from 0 to {count - 1}"
        raise _refused(f"process_id is {process_id!r}; write {numbers}, another one in each of the {count} processes")
    if cpus is None or cpus < 1:
        raise _refused(f"num_cpu_devices is {num_cpu_devices!r}; write how many devices the CPU becomes, 1 or more")
    if refusal := clients.too_many(cpus):
        raise LoadError("device-count", refusal)
    if collectives not in ("gloo", "mpi"):
        raise _refused(f"collectives is {collectives!r}; write 'gloo' or 'mpi'")
    if collectives == "mpi" and not os.environ.get("MPITRAMPOLINE_LIB"):
        what = "jaxlib finds MPI by MPITRAMPOLINE_LIB, which is not set"
        raise _refused(f"{what}: set it to a library of MPIwrapper, or write collectives='gloo'")
    return _Coordinator(host.strip("[]"), int(port))


def _whole(value: object) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _refuse_if_begun(where: _Coordinator) -> None:
    if clients.jax_joined():
        raise _refused("this process called jax.distributed.initialize; leave out stagec.distributed: JAX's devices do")
    if _BEGUN:
        raise _refused(f"this process called stagec.distributed before, for {_BEGUN[0]}; do so once, in a new process")
    if used := clients.in_use():
        what = f"this process has used devices of {used} already"
        raise _refused(f"{what}; call stagec.distributed before the first array and the first call")
    try:
        socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _refused(f"the coordinator's host {where.host} is not known here: {error.strerror}") from error


def _serve(where: _Coordinator, num_processes: int, heartbeat_timeout: int) -> _jax.DistributedRuntimeService:
    """Start the coordinator: for a loopback address on that, otherwise on all of the machine's, as JAX does."""
    local = where.host == "localhost" or where.host.startswith("127.") or where.host == "::1"
    try:
        # jaxlib sometimes ends the process by SIGSEGV after it could not listen.
        family, kind, _, _, address = socket.getaddrinfo(where.host if local else None, where.port, **_LISTENING)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        return _jax.get_distributed_runtime_service(
            str(where) if local else f"[::]:{where.port}",
            num_processes,
            heartbeat_timeout=heartbeat_timeout,
            cluster_register_timeout=_LONG,
        )
    except (OSError, _jax.JaxRuntimeError) as error:
        raise _refused(f"process 0 cannot listen on port {where.port}: {error}; choose another port") from error


def _connect(
    runtime: _jax.DistributedRuntimeClient, where: _Coordinator, num_processes: int, deadline: float, timeout: int
) -> None:
    """Wait until all processes have come, in a thread: XLA itself ends the process when they do not."""
    failed: list[Exception] = []

    def connect() -> None:
        try:
            runtime.connect()
        except _jax.JaxRuntimeError as error:
            failed.append(error)

    waiting = threading.Thread(target=connect, name="stagec-distributed", daemon=True)
    waiting.start()
    answered = False
    while waiting.is_alive() and (left := deadline - time.monotonic()) > 0:
        waiting.join(min(1.0, left))
        answered = answered or _listens(where)
    if failed:
        raise _refused(f"the coordinator at {where} refuses this process: {failed[0]}") from failed[0]
    if not waiting.is_alive():
        return
    if _listens(where):
        same = "each calls stagec.distributed with this coordinator and this num_processes, and a process_id of its own"
        raise _refused(f"not all of the {num_processes} processes came to {where} in {timeout} seconds: {same}")
    if answered:
        what = f"process 0 has left {where} before all of the {num_processes} processes came"
        raise _refused(f"{what}: start all of them again, within its initialization_timeout")
    what = f"no coordinator answers at {where} in {timeout} seconds"
    raise _refused(f"{what}: start process 0, or check that its port can be reached from here")


def _check_counts(runtime: _jax.DistributedRuntimeClient, where: _Coordinator) -> None:
    """Raise LoadError if processes have different numbers of processes: XLA says nothing.

    To be called when XLA has exchanged the devices: then each process has said its number.
    """
    told = sorted((int(key.removeprefix(_COUNTS)), count) for key, count in runtime.key_value_dir_get(_COUNTS))
    if len({count for _, count in told}) > 1:
        each = ", ".join(f"{count} in process {number}" for number, count in told)
        raise _refused(f"num_processes differs between the processes at {where}: {each}; write the same in each")


def _listens(where: _Coordinator) -> bool:
    try:
        socket.create_connection(where, timeout=1).close()
    except OSError:
        return False
    return True


def _carrier(collectives: str, runtime: _jax.DistributedRuntimeClient, where: _Coordinator) -> _jax.CpuCollectives:
    """Return the library that carries arrays between the CPUs of the processes."""
    if collectives == "mpi":
        mpi: Any = _jax.make_mpi_collectives()
        mpi.Init()
        atexit.register(mpi.Finalize)
        return mpi
    return _jax.make_gloo_tcp_collectives(distributed_client=runtime, hostname=_own_address(where))


def _own_address(where: _Coordinator) -> str:
    """Return this machine's address on the way to the coordinator. gloo would take what the machine's name means."""
    family, kind, _, _, address = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _leave(runtime: _jax.DistributedRuntimeClient, service: _jax.DistributedRuntimeService | None) -> None:
    """Wait for the others and leave with them: a process that is gone without it counts as dead."""
    runtime.shutdown()
    if service is not None:
        service.shutdown()


def _refused(what: str) -> LoadError:
    return LoadError("distributed", what)
