"""The file with what JAX lowers for each device."""

import pytest

import stagec
from stagec.building import by_device
from stagec.hardware import catalog

V5E, V6E, H200, CPU = map(catalog.target, ("v5e:2x2", "v6e:2x2", "h200", "cpu-avx2"))


def test_each_target_finds_its_own() -> None:
    data = by_device.write({"TPU v5 lite": b"one", "TPU v6 lite": b"two", "NVIDIA H200": b"one"})
    assert [by_device.read(data, target) for target in (V5E, V6E, H200, CPU)] == [b"one", b"two", b"one", None]
    assert data.count(b"one") == 1


def test_each_can_be_changed() -> None:
    data = by_device.write({"TPU v5 lite": b"one", "TPU v6 lite": b"two"})
    assert by_device.changed(data, bytes.upper) == by_device.write({"TPU v5 lite": b"ONE", "TPU v6 lite": b"TWO"})
    assert by_device.changed(b"", bytes.upper) == b""


def test_where_there_is_none_it_is_the_portable_artifact() -> None:
    assert by_device.write({}) == b""
    assert by_device.read(b"", V5E) is None
    assert by_device.read(by_device.write({"TPU v6 lite": b"two"}), V5E) is None


@pytest.mark.parametrize("at", [0, 40, -30])
def test_damaged_bytes(at: int) -> None:
    data = bytearray(by_device.write({"TPU v5 lite": b"x" * 50}))
    data[at] ^= 1
    with pytest.raises(stagec.NotExported, match="what JAX lowered for devices: "):
        by_device.read(bytes(data), V5E)
