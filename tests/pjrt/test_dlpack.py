"""Arrays of NumPy, JAX and PyTorch are device arrays in the same memory, and device arrays are theirs.

CuPy is not here: what it needs is the protocol, which `Foreign` has. PyTorch is where `tests/torch.lock` was installed.

Modules: `pjrt/capsules.py`, `pjrt/dlpack.py`.
"""

import gc
import subprocess
import sys
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxlib import xla_client

import stagec
import stagec_arrays.numpy as xp
from stagec.pjrt.arrays import DeviceArray
from tests.building import COMPILER


def aligned(count: int = 8, offset: int = 0, dtype: Any = np.float32) -> Any:
    """An array of NumPy's whose memory begins `offset` elements after a multiple of 64 bytes."""
    size = np.dtype(dtype).itemsize
    memory = np.zeros(count + 128 // size, dtype)
    first = -(memory.ctypes.data // size) % (64 // size) + offset
    array = memory[first : first + count]
    array[:] = np.arange(count)
    return array


class Foreign:
    """An array of a library that has the protocol and nothing else, as CuPy's."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def place(array: DeviceArray) -> int:
    return int(array._buffer.unsafe_buffer_pointer())


@pytest.mark.parametrize("make", [lambda x: x, Foreign], ids=["numpy", "foreign"])
@pytest.mark.parametrize("copy", [None, False])
def test_memory_is_shared(make: Any, copy: bool | None) -> None:
    values = aligned()
    for take in (stagec.from_dlpack, xp.from_dlpack):
        array = take(make(values), copy=copy)
        assert (place(array), array.dtype, array.shape) == (values.ctypes.data, values.dtype, values.shape)
        np.testing.assert_array_equal(array, values)
        back = np.from_dlpack(array)
        assert (back.ctypes.data, back.flags.writeable) == (values.ctypes.data, False)


@pytest.mark.parametrize("take", [stagec.from_dlpack, xp.from_dlpack])
@pytest.mark.parametrize("make", [lambda x: x, Foreign], ids=["numpy", "foreign"])
@pytest.mark.parametrize("which", ["unaligned", "gaps", "columns"])
def test_what_must_be_copied_is_copied(take: Any, make: Any, which: str) -> None:
    values = {"unaligned": aligned(8, 1), "gaps": aligned(16)[::2], "columns": aligned(8).reshape(2, 4).T}[which]
    array = take(make(values))
    np.testing.assert_array_equal(array, values)
    shares = take is stagec.from_dlpack and which == "columns" and make is Foreign  # a device array keeps the order
    assert (place(array) == values.ctypes.data) == shares
    if not shares:
        with pytest.raises(ValueError, match=r"leave copy out"):
            take(make(values), copy=False)


def test_a_copy_where_one_is_asked_for() -> None:
    values = aligned()
    for make in (stagec.from_dlpack, xp.from_dlpack):
        for given in (values, Foreign(values), jnp.asarray(values), make(values)):
            array = make(given, copy=True)
            assert place(array) != values.ctypes.data
            np.testing.assert_array_equal(array, values)


def test_read_only_arrays_and_dtypes_of_others() -> None:
    values = aligned()
    values.flags.writeable = False
    assert place(stagec.from_dlpack(values)) == values.ctypes.data
    narrow = aligned(8, dtype=ml_dtypes.bfloat16)
    for given in (narrow, jnp.asarray(narrow)):
        array = stagec.from_dlpack(given)
        assert array.dtype == narrow.dtype
        np.testing.assert_array_equal(array, narrow)
    swapped = aligned().astype(">f4")
    array = stagec.from_dlpack(swapped)
    np.testing.assert_array_equal(array, np.arange(8))
    assert array.dtype.isnative
    # Dtypes that arrays here do not have without x64 are converted; the loader's arrays keep them.
    double = aligned(8, dtype=np.float64)
    assert place(stagec.from_dlpack(double)) == double.ctypes.data
    assert xp.from_dlpack(double).dtype == np.float32


def test_without_jax() -> None:
    """jaxlib's arrays have neither shape nor dtype where JAX was not imported."""
    script = f"""
import sys
sys.modules["jax"] = None
sys.path[:0] = {[str(COMPILER), *(entry for entry in sys.path if entry.endswith("site-packages"))]!r}
import ml_dtypes, numpy as np, stagec
for dtype in (np.float32, np.float16, np.int8, np.uint64, np.bool_, np.complex64, ml_dtypes.bfloat16):
    for shape in ((), (4, 3), (2, 0)):
        own = stagec.device_put(np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype))
        array = stagec.from_dlpack(own, copy=False)
        assert (array.shape, array.dtype) == (shape, dtype), (array.shape, array.dtype)
        assert np.asarray(array).tobytes() == np.asarray(own).tobytes()
"""
    done = subprocess.run([sys.executable, "-B", "-S", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "capsule", [lambda: np.ones(4).__dlpack__(max_version=(1, 0)), lambda: None], ids=["1.0", "none"]
)
def test_what_is_no_such_capsule(capsule: Any) -> None:
    class Other:
        def __dlpack__(self) -> Any:
            return capsule()

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    with pytest.raises(BufferError, match=r"__dlpack__ gives no capsule of a DLPack below 1\.0: PyCapsule_GetPointer"):
        stagec.from_dlpack(Other())


def test_jaxs_arrays_share_memory_both_ways() -> None:
    x = jnp.arange(8.0)
    array = stagec.from_dlpack(x)
    assert place(array) == x.unsafe_buffer_pointer()
    assert jnp.from_dlpack(array).unsafe_buffer_pointer() == x.unsafe_buffer_pointer()


def test_memory_lives_as_long_as_its_last_view() -> None:
    class Tracked(np.ndarray[Any, Any]):
        pass

    values = aligned().view(Tracked)
    alive = weakref.ref(values)
    array = stagec.from_dlpack(Foreign(values))
    view = np.from_dlpack(array)
    del values, array
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(view, np.arange(8))
    del view
    gc.collect()
    assert alive() is None


def test_what_is_donated() -> None:
    """XLA never writes into memory of others; of an array that is gone there is nothing to share."""
    increment = stagec.jit(lambda x: x + 1, frontend="arrays", donate_argnums=0)
    values = aligned()
    for given in (values, Foreign(values)):
        np.testing.assert_array_equal(increment(stagec.from_dlpack(given)), np.arange(8) + 1)
        np.testing.assert_array_equal(values, np.arange(8))
    own = increment(xp.arange(8.0))
    increment(own)
    for take in (stagec.from_dlpack, xp.asarray, jnp.from_dlpack, np.from_dlpack):
        with pytest.raises(stagec.CallError) as refusal:
            np.asarray(take(own))
        assert refusal.value.code == "deleted"


def test_another_device() -> None:
    client: Any = xla_client.make_cpu_client(num_devices=2)
    other = client.local_devices()[1]
    values = aligned()
    array = stagec.from_dlpack(values, device=other)
    assert (place(array), array.sharding.devices) == (values.ctypes.data, (other,))
    again = stagec.from_dlpack(Foreign(values), device=other, copy=False)
    assert (place(again), again.sharding.devices) == (values.ctypes.data, (other,))


def test_what_has_no_dlpack() -> None:
    with pytest.raises(TypeError, match="a list has no DLPack: it lacks __dlpack__ or __dlpack_device__"):
        stagec.from_dlpack([1])

    class Elsewhere(Foreign):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 8, 0

    with pytest.raises(BufferError, match=r"on DLPack's device \(8, 0\); XLA shares CPUs and NVIDIA's"):
        stagec.from_dlpack(Elsewhere(aligned()))


def test_a_constant_of_a_trace() -> None:
    values = aligned()
    traced = stagec.jit(lambda x: x + xp.from_dlpack(values), frontend="arrays")
    np.testing.assert_array_equal(traced(values), values * 2)


def test_a_function_of_a_bundle_takes_them(zoo: Any) -> None:
    x = aligned(16).reshape(1, 16)
    with stagec.load(zoo) as bundle:
        params = {"w": np.ones((16, 4), np.float32), "b": np.zeros(4, np.float32)}
        wanted = bundle["mlp"](params, x)
        result = bundle["mlp"](params, stagec.from_dlpack(x))
        assert type(result) is DeviceArray
        np.testing.assert_array_equal(result, wanted)
        of_jax = bundle["mlp"](params, jnp.from_dlpack(stagec.from_dlpack(x)))
        assert isinstance(of_jax, jax.Array)
        np.testing.assert_array_equal(of_jax, wanted)


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def test_tensors_share_memory_both_ways(torch: Any) -> None:
    tensor = torch.arange(8, dtype=torch.float32)
    for take in (stagec.from_dlpack, xp.from_dlpack):
        array = take(tensor)
        assert place(array) == tensor.data_ptr()
        back = torch.from_dlpack(array)
        assert (back.data_ptr(), back.dtype) == (tensor.data_ptr(), tensor.dtype)
        tensor[0] = 7
        assert float(array.numpy()[0]) == 7
        tensor[0] = 0
    for name in ("bfloat16", "int64", "bool", "complex64"):
        tensor = torch.ones(4, dtype=getattr(torch, name))
        array = stagec.from_dlpack(tensor)
        assert (array.dtype.name, place(array)) == (name, tensor.data_ptr())
        assert torch.equal(torch.from_dlpack(array), tensor)


def test_tensors_of_results(torch: Any, zoo: Any) -> None:
    x = torch.linspace(0, 1, 16).reshape(1, 16)
    params = {"w": torch.ones(16, 4), "b": torch.zeros(4)}
    with stagec.load(zoo) as bundle:
        given = {name: stagec.from_dlpack(value) for name, value in params.items()}
        result = bundle["mlp"](given, stagec.from_dlpack(x))
        tensor = torch.from_dlpack(result)
        assert tensor.data_ptr() == place(result)
        wanted = torch.softmax(torch.tanh(x @ params["w"]), 1)
        torch.testing.assert_close(tensor, wanted)


def test_a_donated_tensor_is_not_written(torch: Any) -> None:
    increment = stagec.jit(lambda x: x + 1, frontend="arrays", donate_argnums=0)
    tensor = torch.zeros(64)
    assert torch.equal(torch.from_dlpack(increment(stagec.from_dlpack(tensor))), tensor + 1)
    assert torch.equal(tensor, torch.zeros(64))


def test_a_tensor_that_needs_a_gradient_says_so(torch: Any) -> None:
    with pytest.raises(BufferError, match="gradient"):
        stagec.from_dlpack(torch.ones(4, requires_grad=True))
