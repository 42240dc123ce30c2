"""XLA's runtime for AMD devices on a driver that is a fake, as test_fake_driver.py has it for NVIDIA's.

Modules: `pjrt/accelerators.py`, `pjrt/gpu_calls.py`.
"""

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stagec.backends.gpu import code_objects, container
from stagec.bundle.archive import Archive
from stagec.hardware import gpu_devices, rocm
from tests import building
from tests.backends.deviceless import installed
from tests.bundles import edited, edited_descriptions
from tests.fake_device import fake

pytestmark = installed(jax_rocm7_pjrt="jax_plugins.xla_rocm7", jax_rocm7_plugin="jax_rocm7_plugin")
FUNCTIONS = ("dense", "transformer_step", "triton", "factorized")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fake.install_driver(tmp_path_factory.mktemp("driver"), rocm.device("mi300x"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What XLA:GPU compiles without a device."""
    return building.build("tests/fake_device/rocm.toml", tmp_path_factory.mktemp("bundle"))


def test_xla_says_of_the_device_what_its_table_says(device: dict[str, str]) -> None:
    done = fake.stagec("describe-device", environment=device)
    assert done.returncode == 0, done.stderr
    table = rocm.device("mi300x")
    # What no driver says.
    known = "memory_bandwidth", "active_links", "pcie_bandwidth", "infinity_fabric_bandwidth", "bf16_flops"
    described = {**tomllib.loads(done.stdout), **{name: getattr(table, name) for name in known}}
    assert gpu_devices.read("rocm", described) == table


def test_xla_loads_edited_executables_and_launches_their_kernels(
    device: dict[str, str], bundle: Path, tmp_path: Path
) -> None:
    rows = fake.called(bundle, *FUNCTIONS, device=device, kernels=str(tmp_path / "kernels"))
    assert all(rows[name]["loaded"] for name in FUNCTIONS)
    assert rows["dense"]["shapes"] == [[8, 64]]
    # A library of ROCm's that is not here.
    kind, code, text = rows["factorized"].pop("error")
    assert (kind, code) == ("RunError", "execution")
    assert "hipSolver error" in text
    assert not [name for name in FUNCTIONS if "error" in rows[name]]
    launched = set((tmp_path / "kernels").read_text().split())
    archive = Archive(str(bundle))
    for name in ("dense", "transformer_step", "triton"):
        (entry,) = archive.index["functions"][name]["executables"]
        launches = [*container.launches(archive[entry["executable"]])]
        kernels = {each.function for each in launches}
        assert kernels, name
        assert kernels <= launched, name
    (of_pallas,) = launches
    assert of_pallas.code is not None
    kernel = code_objects.read(of_pallas.code)[of_pallas.function]
    assert (of_pallas.blocks, of_pallas.threads, kernel.registers > 0, kernel.spills) == (4, 256, True, 0)


def test_memory_that_xla_takes_is_what_was_told(device: dict[str, str], bundle: Path) -> None:
    (row,) = fake.called(bundle, "dense", device=device).values()
    # For a call of hipBLASLt, XLA takes 256 bytes more.
    assert 0 <= row["taken"]["peak_bytes_in_use"] - row["told"]["peak_memory_in_bytes"] <= 256


def test_failures_in_the_words_of_xla(device: dict[str, str], bundle: Path) -> None:
    (row,) = fake.called(bundle, "dense", device=device, failure="no-driver").values()
    assert row["error"][:2] == ["LoadError", "platform"]
    assert "jax-rocm7-pjrt finds no AMD device it can use: " in row["error"][2]
    (row,) = fake.called(bundle, "dense", device=device, failure="lost").values()
    assert row["error"][:2] == ["RunError", "execution"]
    assert "dense: INTERNAL: " in row["error"][2]


def test_damaged_executables_reach_no_reader(device: dict[str, str], bundle: Path, tmp_path: Path) -> None:
    """The digest refuses them. Where it was made to fit, XLA's reader does, by the checksums in the container."""
    member = "dense.mi300x.batch8.xla"
    original = Archive(str(bundle))[member]
    place = len(original) // 2
    damaged = original[:place] + bytes([original[place] ^ 0x55]) + original[place + 1 :]

    def damage(members: dict[str, bytes]) -> None:
        members[member] = damaged

    def describe(description: dict[str, Any]) -> None:
        description["executable_sha256"] = hashlib.sha256(damaged).hexdigest()

    plain = edited(bundle, tmp_path / "plain.aot", damage)
    fits = edited_descriptions(plain, tmp_path / "fits.aot", "dense", describe)
    for path, code in ((plain, "digest"), (fits, "executable")):
        (row,) = fake.called(path, "dense", device=device).values()
        assert row["error"][:2] == ["LoadError", code]
