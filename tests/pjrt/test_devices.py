"""Which devices a function runs on, what lies on them, and what happens to donated arrays.

Modules: `pjrt/accelerators.py`, `pjrt/clients.py`, `pjrt/packages.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stagec
from stagec.core.builds.platforms import PLATFORMS
from stagec.pjrt import accelerators, clients
from tests.building import COMPILER

X = np.arange(8, dtype=np.float32)
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
STATE = {"x": np.arange(4, dtype=np.float32), "y": [np.float32(1)]}


def test_one_device_of_four(zoo: Path) -> None:
    device = stagec.devices("cpu", 4)[3]
    expected = stagec.load(zoo)["loop"](X)
    (_, carry), last = stagec.load(zoo, devices=[device])["loop"](stagec.device_put(X, device))
    assert carry.sharding.device_set == {device}
    assert device.id == 3
    assert carry.numpy().tobytes() == expected[0][1].tobytes()
    assert last.numpy().tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("order", [(2, 3), (3, 2), (0, 3)])
def test_two_devices_of_four(zoo: Path, order: tuple[int, ...]) -> None:
    here = stagec.devices("cpu", 4)
    devices = [here[i] for i in order]
    halves = stagec.load(zoo, devices=devices)["halves"]
    more, total = halves(stagec.device_put(ROWS))
    np.testing.assert_array_equal(more.numpy(), ROWS + 1)
    np.testing.assert_array_equal(total.numpy(), ROWS[:2] + ROWS[2:])
    assert [shard.device for shard in more.addressable_shards] == devices
    np.testing.assert_array_equal(more.addressable_shards[1].data, ROWS[2:] + 1)
    assert [shard.replica_id for shard in total.addressable_shards] == [0, 1]


def test_too_few_devices(zoo: Path) -> None:
    bundle = stagec.load(zoo, devices=stagec.devices("cpu", 2))
    with pytest.raises(stagec.LoadError) as refusal:
        bundle["sharded"]({"w": np.zeros((6, 4), np.float32), "b": np.zeros(4, np.float32)}, np.zeros((4, 6), "f4"))
    assert refusal.value.code == "device-count"
    assert "cpu: it runs on 4 devices, 2 were named" in str(refusal.value)


def test_parts_of_an_array(zoo: Path) -> None:
    halves = stagec.load(zoo)["halves"]
    ((sharding,), _) = halves.input_shardings(ROWS)
    assert sharding.shard_shape((4, 3)) == (2, 3)
    assert list(sharding.devices_indices_map((4, 3)).values()) == [
        (slice(0, 2), slice(0, 3)),
        (slice(2, 4), slice(0, 3)),
    ]
    array = stagec.make_array_from_single_device_arrays((4, 3), sharding, [ROWS[:2], ROWS[2:]])
    more, _ = halves(array)
    np.testing.assert_array_equal(more.numpy(), ROWS + 1)
    again, _ = halves(more)  # it lies there already: no copy
    np.testing.assert_array_equal([shard.data for shard in again.addressable_shards], [ROWS[:2] + 2, ROWS[2:] + 2])
    with pytest.raises(stagec.CallError, match="part 1 has shape \\(1, 3\\), \\(2, 3\\) is on its device"):
        stagec.make_array_from_single_device_arrays((4, 3), sharding, [ROWS[:2], ROWS[:1]])
    with pytest.raises(stagec.CallError, match="2 devices hold the array, 1 parts are given"):
        stagec.make_array_from_single_device_arrays((4, 3), sharding, [ROWS])
    with pytest.raises(stagec.CallError, match="part 1 has dtype int32, part 0 has float32"):
        stagec.make_array_from_single_device_arrays((4, 3), sharding, [ROWS[:2], ROWS[2:].astype(np.int32)])


def test_an_array_moves_to_where_it_is_wanted(zoo: Path) -> None:
    first, last = (stagec.devices("cpu", 4)[i] for i in (0, 3))
    moved = stagec.load(zoo, devices=[last])["update"](stagec.device_put(STATE, first), np.float32(1))
    assert moved["x"].sharding.device_set == {last}
    np.testing.assert_array_equal(moved["x"].numpy(), STATE["x"] + 1)


def test_donation_can_be_left_out_of_a_call(zoo: Path) -> None:
    update = stagec.load(zoo)["update"]
    state = stagec.device_put(STATE)
    for _ in range(2):
        result = update.with_options(donate=False)(state, np.float32(1))
        np.testing.assert_array_equal(result["x"].numpy(), STATE["x"] + 1)
    np.testing.assert_array_equal(state["x"].numpy(), STATE["x"])
    update(state, np.float32(1))
    assert state["x"].is_deleted()


def test_a_compiled_fallback_donates_and_splits_as_well(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stagec.pjrt import host

    flags = host.cpu_flags() - {"avx2"}
    monkeypatch.setattr(host, "cpu_flags", lambda: flags)
    devices = stagec.devices("cpu", 4)[2:]
    bundle = stagec.load(zoo, devices=devices)
    state = stagec.device_put(STATE, devices[0])
    np.testing.assert_array_equal(bundle["update"](state, np.float32(1))["x"].numpy(), STATE["x"] + 1)
    assert state["x"].is_deleted()
    more, total = bundle["halves"](stagec.device_put(ROWS))
    assert [shard.device for shard in more.addressable_shards] == devices
    np.testing.assert_array_equal(total.numpy(), ROWS[:2] + ROWS[2:])


ACCELERATORS = sorted(name for name, platform in PLATFORMS.items() if platform.plugin)


@pytest.mark.parametrize("platform", ACCELERATORS)
def test_an_accelerator_that_is_not_here(platform: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = PLATFORMS[platform].device
    monkeypatch.setattr(accelerators, "_DEVICES", tmp_path)
    with pytest.raises(stagec.LoadError) as refusal:
        stagec.devices(platform)
    assert refusal.value.code == "platform"
    assert str(refusal.value).startswith(f"this machine has no {told}: no {tmp_path}/")


@pytest.mark.parametrize(("platform", "node"), [("cuda", "nvidia0"), ("tpu", "accel0"), ("tpu", "vfio/0")])
def test_a_plugin_that_is_not_installed(
    platform: str, node: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / node).parent.mkdir(exist_ok=True)
    (tmp_path / node).touch()
    plugin = PLATFORMS[platform].plugin
    assert plugin is not None
    monkeypatch.setattr(accelerators, "_DEVICES", tmp_path)
    monkeypatch.setattr(accelerators, "_PCI", tmp_path / "pci")
    if platform == "tpu":
        slot = tmp_path / "pci" / "0000:00:05.0"
        slot.mkdir(parents=True)
        (slot / "vendor").write_text("0x1ae0\n")
        (slot / "device").write_text("0x0042\n")  # a network card of the same vendor
        assert accelerators.refusal("tpu") == f"this machine has no TPU: none on its PCI bus ({tmp_path}/pci)"
        (slot / "device").write_text("0x0063\n")
    monkeypatch.setattr(accelerators, "library", lambda plugin: None)
    text = f"the plugin for {platform} is not installed: pip install {plugin.distribution}"
    assert accelerators.refusal(platform) == text


def test_a_platform_without_a_client() -> None:
    assert accelerators.refusal("metal") == "this loader has no client for metal"


def test_a_client_is_made_once_by_many_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(clients.cpu_client, [3] * 8))
    assert all(client is found[0] for client in found)


LINEAR_ALGEBRA = """
import sys
sys.path[:0] = {path!r}
import numpy as np, stagec
a = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
cholesky, eigenvalues, inverse, singular = stagec.load({bundle!r}, policy="executable_only")["factorize"](a)
spd = a @ a.T + 5 * np.eye(5, dtype=np.float32)
np.testing.assert_allclose(cholesky @ cholesky.T, spd, rtol=1e-4)
np.testing.assert_allclose(np.sort(eigenvalues), np.linalg.eigvalsh(spd), rtol=1e-4)
np.testing.assert_allclose(inverse @ spd, np.eye(5), atol=1e-4)
np.testing.assert_allclose(singular, np.linalg.svd(a)[1], rtol=1e-4)
assert "jax" not in sys.modules
"""


def test_linear_algebra_in_a_process_that_imports_the_loader_only(zoo: Path) -> None:
    path = [str(COMPILER), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    script = LINEAR_ALGEBRA.format(path=path, bundle=str(zoo))
    done = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


READING = """
import sys
sys.path[:0] = {path!r}
import ml_dtypes, numpy as np, stagec
for shape in ((), (0, 3), (2, 3)):
    for dtype in (ml_dtypes.bfloat16, np.float32, np.bool_):
        wanted = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        array = stagec.device_put(wanted)
        values = np.asarray(array)
        del array  # the values keep its memory
        assert values.dtype == dtype and not values.flags.writeable, values
        np.testing.assert_array_equal(values, wanted)
assert "jax" not in sys.modules
"""


def test_reading_an_array_imports_no_jax() -> None:
    path = [str(COMPILER), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    done = subprocess.run([sys.executable, "-c", READING.format(path=path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
