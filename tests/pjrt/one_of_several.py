"""One of several processes: `python one_of_several.py ROLE PORT PROCESS_ID NUM_PROCESSES CPU_DEVICES ...`.

Each role is a function of this file.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROLE, PORT, *NUMBERS = sys.argv[1:6]
PROCESS_ID, NUM_PROCESSES, CPU_DEVICES = map(int, NUMBERS)
COORDINATOR = f"127.0.0.1:{PORT}"
STEPS = 20
RANDOM = np.random.default_rng(0)
W, X, Y = (RANDOM.normal(size=shape).astype(np.float32) for shape in ((64, 8), (32, 64), (32, 8)))
STEP = "step" if NUM_PROCESSES * CPU_DEVICES == 2 else "step_of_four"


def join() -> Any:
    """Join the others without JAX."""
    sys.modules["jax"] = None  # type: ignore[assignment]
    import stagec

    stagec.distributed(
        COORDINATOR, PROCESS_ID, NUM_PROCESSES, num_cpu_devices=CPU_DEVICES, initialization_timeout=60,
        heartbeat_timeout_seconds=10,
    )  # fmt: skip
    return stagec


def join_by_jax() -> Any:
    """Join the others as JAX does."""
    import jax
    from jaxlib import _jax

    # JAX lets gloo listen on the address that the machine's name stands for. In a chroot it stands for none.
    _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname="127.0.0.1")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    jax.distributed.initialize(COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    return jax


def parts(array: Any) -> list[Any]:
    """What this process has of an array, as bytes in the order of devices."""
    if isinstance(array, np.ndarray):
        return [array.tobytes()]
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [np.asarray(shard.data).tobytes() for shard in shards]


def write(path: str, w: Any, losses: list[bytes]) -> None:
    """Write the losses of all steps, and the parts of the weights."""
    Path(path).write_bytes(b"".join(losses) + b"".join(parts(w)))


def train(bundle: str, out: str) -> None:
    """Take steps from arrays of which this process has its own part, and note each loss in a file."""
    stagec = join()
    step = stagec.load(bundle, policy="executable_only")[STEP]
    w, *data = (
        stagec.make_array_from_process_local_data(sharding, whole, whole.shape)
        for sharding, whole in zip(step.input_shardings(W, X, Y)[0], (W, X, Y), strict=True)
    )
    losses = []
    for number in range(STEPS):
        w, loss = step(w, *data)
        losses.append(np.asarray(loss).tobytes())
        print("step", number, losses[-1].hex(), flush=True)
        if number == 4 and len(sys.argv) > 8:
            sys.stdin.readline()  # until the test says so
    write(out, w, losses)


def train_by_jax(out: str) -> None:
    """Take the same steps as `jax.jit` does."""
    jax = join_by_jax()
    from stagec.backends.cpu import compiler
    from stagec.core.builds.specs import CpuTarget
    from tests.pjrt import spmd

    with compiler.presented(CpuTarget(name="cpu", compiler_options={}, isa="AVX2", parallelism=1)):
        jax.devices()
    P, N = jax.sharding.PartitionSpec, jax.sharding.NamedSharding  # noqa: N806 - as JAX's pages write them
    four = STEP == "step_of_four"
    devices = np.array(jax.devices()).reshape((2, 2) if four else (2,))
    mesh = jax.sharding.Mesh(devices, ("data", "model") if four else ("data",))
    specs = [P(None, "model"), P("data"), P("data", "model")] if four else [P(), P("data"), P("data")]
    shardings = [N(mesh, spec) for spec in specs]
    step = jax.jit(spmd.step, in_shardings=tuple(shardings), out_shardings=(shardings[0], N(mesh, P())))
    w, *data = (
        jax.make_array_from_callback(whole.shape, sharding, lambda index, whole=whole: whole[index])
        for sharding, whole in zip(shardings, (W, X, Y), strict=True)
    )
    losses = []
    for _ in range(STEPS):
        w, loss = step(w, *data)
        losses.append(np.asarray(loss).tobytes())
    write(out, w, losses)


def train_in_jax(bundle: str, out: str) -> None:
    """Take the same steps with the bundle, on JAX's own client."""
    jax = join_by_jax()
    import stagec

    assert stagec.devices("cpu") == jax.devices()
    try:
        stagec.distributed(COORDINATOR, PROCESS_ID, NUM_PROCESSES)
    except stagec.LoadError as error:
        print(error.code, error)
    step = stagec.load(bundle, policy="executable_only")[STEP]
    w: Any = W
    losses = []
    for _ in range(STEPS):
        w, loss = step(w, X, Y)
        losses.append(np.asarray(loss).tobytes())
    shardings, _ = step.input_shardings(W, X, Y)
    if isinstance(w, np.ndarray):  # it is whole here: the parts that devices have are those of the file
        w = stagec.make_array_from_process_local_data(shardings[0], w, w.shape)
    write(out, w, losses)


def arrays(bundle: str, portable: str) -> None:
    """Look at arrays that no process has whole. portable: the same bundle, of which everything is compiled here."""
    stagec = join()
    predict = stagec.load(bundle, policy="executable_only")["predict"]
    rows = slice(16 * PROCESS_ID, 16 * PROCESS_ID + 16)
    result = predict(W, X)  # all numpy in; no numpy array can have the result
    assert type(result).__name__ == "DeviceArray"
    assert not result.is_fully_addressable
    assert repr(result) == "DeviceArray(in several processes, shape=(32, 8), dtype=float32)"
    for read in (np.asarray, lambda array: array.numpy(), lambda array: array.copy().numpy()):
        try:
            read(result)
        except stagec.CallError as error:
            print(error.code, error)
    (shard,) = result.addressable_shards
    assert result.copy().addressable_shards[0].data.tobytes() == shard.data.tobytes()
    assert (shard.index, shard.replica_id) == ((rows, slice(0, 8)), 0)
    assert shard.device.process_index == PROCESS_ID
    np.testing.assert_allclose(shard.data, np.tanh(X @ W)[rows], rtol=2e-6, atol=2e-6)
    (of_w, of_x), _ = predict.input_shardings(W, X)
    for x in (
        stagec.make_array_from_process_local_data(of_x, X[rows]),
        stagec.make_array_from_process_local_data(of_x, X, (32, 64)),
        stagec.make_array_from_single_device_arrays((32, 64), of_x, [X[rows]]),
    ):
        assert x.shape == (32, 64)
        for w in (W, stagec.make_array_from_process_local_data(of_w, W)):
            for _ in range(2):  # the second call is one that is remembered
                again = predict(w, x)
                assert again.addressable_shards[0].data.tobytes() == shard.data.tobytes()
    compiled = stagec.load(portable)["predict"](W, X)
    np.testing.assert_allclose(compiled.addressable_shards[0].data, shard.data, rtol=2e-6, atol=2e-6)
    again = predict(W, X)
    assert again.addressable_shards[0].data.tobytes() == shard.data.tobytes()
    whole = stagec.make_array_from_process_local_data(of_w, W)  # each device has all of it
    np.testing.assert_array_equal(whole, W)
    assert [shard.replica_id for shard in whole.addressable_shards] == [PROCESS_ID]
    for wrong in (lambda: stagec.make_array_from_process_local_data(of_x, X[:5], (32, 64)),
                  lambda: stagec.make_array_from_process_local_data(of_x, X[rows], (32,)),
                  lambda: stagec.make_array_from_process_local_data(of_x, X[:9], (9, 64)),
                  lambda: stagec.make_array_from_single_device_arrays((32, 64), of_x, [X[:16], X[16:]])):  # fmt: skip
        try:
            wrong()
        except stagec.CallError as error:
            print(error.code, error)
    # What runs on one device runs on one of this process, and its results are whole.
    own = stagec.device_put(X)
    assert {device.process_index for device in own.sharding.device_set} == {PROCESS_ID}
    assert type(stagec.load(bundle)["alone"](W, X)) is np.ndarray
    import stagec_arrays.numpy as xp

    assert (xp.asarray([1.0]) + 1).sharding.device_set == own.sharding.device_set
    elsewhere = [device for device in stagec.devices("cpu") if device.process_index != PROCESS_ID]
    try:
        stagec.load(bundle, devices=elsewhere)["alone"](W, X)
    except stagec.LoadError as error:
        print(error.code, error)


def too_few(bundle: str) -> None:
    """Call a function for more devices than all processes have."""
    stagec = join()
    try:
        stagec.load(bundle)["step_of_four"](W, X, Y)
    except stagec.LoadError as error:
        print(error.code, error)
    try:
        stagec.devices("cpu", 5)
    except stagec.LoadError as error:
        print(error.code, error)


def waiting(seconds: str = "2") -> None:
    """Wait for others who do not come, or do not fit, and try again."""
    import stagec

    for _ in range(2):
        try:
            stagec.distributed(COORDINATOR, PROCESS_ID, NUM_PROCESSES, initialization_timeout=int(seconds))
        except stagec.LoadError as error:
            print(error.code, error, flush=True)


def beside_jax() -> None:
    """Compare how arrays lie on devices, and what is made of local data, with JAX's own functions."""
    jax = join_by_jax()
    from hypothesis import given, settings, strategies as st

    import stagec
    from stagec.pjrt.shardings import Sharding

    devices = jax.devices()
    count = len(devices)
    meshes = [shape for shape in ((count,), (2, count // 2), (count // 2, 2), (1, count)) if np.prod(shape) == count]

    @settings(max_examples=150, derandomize=True, deadline=None, database=None)
    @given(st.data())
    def compare(data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(count)))
        shape = data.draw(st.sampled_from(meshes))
        names = ("a", "b")[: len(shape)]
        mesh = jax.sharding.Mesh(np.array([devices[i] for i in order]).reshape(shape), names)
        ndim = data.draw(st.integers(1, 3))
        axes = [None, "a", *([] if len(shape) == 1 else ["b", ("a", "b"), ("b", "a")])]
        left, spec = set(names), []
        for _ in range(ndim):
            axis = data.draw(st.sampled_from([axis for axis in axes if {*(axis or ())} <= left]))
            left -= {*(axis or ())}
            spec.append(axis)
        theirs = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        ours = Sharding(tuple(mesh.devices.flat), theirs._to_xla_hlo_sharding(ndim))
        whole_shape = tuple(count * data.draw(st.integers(1, 2)) for _ in range(ndim))
        places = {
            device: tuple(slice(*where.indices(size)[:2]) for where, size in zip(index, whole_shape, strict=True))
            for device, index in theirs.devices_indices_map(whole_shape).items()
        }
        assert ours.devices_indices_map(whole_shape) == places
        assert ours.is_fully_addressable == theirs.is_fully_addressable
        whole = np.arange(np.prod(whole_shape), dtype=np.int32).reshape(whole_shape)
        mine = [places[device] for device in mesh.local_devices]
        # Along each dimension all of the array, or what this process has of it, or something else.
        local: list[Any] = []
        for i, size in enumerate(whole_shape):
            kept = sorted({n for place in mine for n in range(place[i].start, place[i].stop)})
            local.append(data.draw(st.sampled_from([list(range(size)), kept, kept[:1]])))
        values = whole[np.ix_(*local)]
        for global_shape in (whole_shape, None):
            try:
                expected = jax.make_array_from_process_local_data(theirs, values, global_shape)
            except ValueError as error:
                expected = error
            try:
                made = stagec.make_array_from_process_local_data(ours, values, global_shape)
            except stagec.CallError:
                made = None
            assert (made is None) == isinstance(expected, ValueError), (made, expected)
            if made is None:
                continue
            assert made.shape == expected.shape
            by_device = {shard.device: shard for shard in made.addressable_shards}
            assert len(by_device) == len(expected.addressable_shards)
            for shard in expected.addressable_shards:
                np.testing.assert_array_equal(by_device[shard.device].data, np.asarray(shard.data))
                assert by_device[shard.device].replica_id == shard.replica_id

    compare()


if __name__ == "__main__":
    globals()[ROLE](*sys.argv[6:8])
