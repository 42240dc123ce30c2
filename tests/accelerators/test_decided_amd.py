"""What XLA decided for AMD devices, run on CPUs: it gives what JAX gives, for one device and for eight.

Modules: `stagec_insight/decided.py`, `stagec_insight/device_calls.py`.
"""

from pathlib import Path

from tests.accelerators import table
from tests.backends.deviceless import installed
from tests.building import ROOT, build

pytestmark = installed(jax_rocm7_pjrt="jax_plugins.xla_rocm7", jax_rocm7_plugin="jax_rocm7_plugin")

FUNCTIONS = ["convolution", "eigenvalues", "exchanges_eight", "mlp", "orthogonal", "transformer"]


def test_programs_for_amd_devices_give_what_jax_gives(tmp_path: Path) -> None:
    """The whole manifest, with `stagec build` and `stagec emulate`, was compared for docs/hardware.md."""
    (tmp_path / "amd.toml").write_text(table.for_amd((ROOT / table.MANIFEST).read_text("utf-8")))
    (tmp_path / "out").mkdir()
    told = table.compare(build("amd.toml", tmp_path / "out", tmp_path, import_roots=(ROOT,), only=FUNCTIONS))
    assert [row for row in told["checks"] if not row["ok"]] == []
    assert told.get("refused", []) == []
    ran = {(row["function"], row["target"].removesuffix(", on CPUs")) for row in told["checks"]}
    eight = {True: ("mi300x-8", "mi355x-8"), False: ("mi300x", "mi355x")}
    assert ran == {(name, target) for name in FUNCTIONS for target in eight[name.endswith("eight")]}
