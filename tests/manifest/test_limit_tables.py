"""Tables of limits: what they say, how sizes are written, and the full text of every message.

Modules: `manifest/models.py`, `manifest/values.py`.
"""

from dataclasses import asdict
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from stagec.core.builds.specs import Limits
from stagec.core.messages.errors import StagecError
from stagec.manifest import load_manifest, plan

HEAD = """
[manifest]
name = "m"
version = "1"
[functions.f]
entry = "pkg.mod:f"
args = ["f32[3]"]
targets = ["cpu-avx2", "v5e:2x2"]
"""


def limits_of(text: str, folder: Path) -> dict[str, Limits]:
    """The limits of each executable, by its name."""
    path = folder / "manifest.toml"
    path.write_text(HEAD + dedent(text))
    return {executable.name: executable.spec.limits for executable in plan(load_manifest(path, "m.toml")).executables}


def test_limits_are_in_the_slices_of_their_target(tmp_path: Path) -> None:
    found = limits_of(
        """
        [functions.f.limits."v5e:2x2"]
        peak_memory = "2GiB"
        flops = "1.5e12"
        bytes_accessed = 40_000_000
        collectives = { all-reduce = 2, all-gather = 0 }
        executable_size = "500 kB"
        compile_time = 60
        allow_unknown = true
        """,
        tmp_path,
    )
    assert asdict(found["m.f.v5e-2x2"]) == {
        "key": 'functions.f.limits."v5e:2x2"',
        "peak_memory": 2 << 30,
        "flops": 1_500_000_000_000,
        "bytes_accessed": 40_000_000,
        "collectives": {"all-reduce": 2, "all-gather": 0},
        "executable_size": 500_000,
        "registers": None,
        "shared_memory": None,
        "spills": None,
        "compile_time": 60.0,
        "allow_unknown": True,
    }
    assert found["m.f.cpu-avx2"] == Limits()


def test_limits_of_kernels_are_for_gpus_alone(tmp_path: Path) -> None:
    text = '[functions.f.limits."v5e:2x2"]\nspills = 0\nregisters = 128\nshared_memory = "64KiB"\n'
    with pytest.raises(StagecError) as refused:
        limits_of(text, tmp_path)
    path = 'm.toml: functions.f.limits."v5e:2x2".'
    what = 'only executables for GPUs have kernels, and "v5e:2x2" is for tpu\n  leave it out'
    assert str(refused.value) == "\n".join(f"{path}{key}: {what}" for key in ("registers", "shared_memory", "spills"))
    for name in ("h200", "mi300x"):
        of_gpu = HEAD.replace('"cpu-avx2", "v5e:2x2"', f'"{name}"') + text.replace('"v5e:2x2"', name)
        (tmp_path / "manifest.toml").write_text(of_gpu)
        (executable,) = plan(load_manifest(tmp_path / "manifest.toml", "m.toml")).executables
        limits = executable.spec.limits
        assert (limits.registers, limits.shared_memory, limits.spills) == (128, 65536, 0)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("0", 0),
        ("7", 7),
        ('"7"', 7),
        ('"7B"', 7),
        ("1.5e3", 1500),
        ('"1.5e12"', 1_500_000_000_000),
        ('"1.5 kB"', 1500),
        ('"3KB"', 3000),
        ('"500MB"', 500_000_000),
        ('"2GB"', 2_000_000_000),
        ('"2TB"', 2 * 10**12),
        ('"2KiB"', 2048),
        ('"2.5MiB"', 5 << 19),
        ('"2GiB"', 2 << 30),
        ('"1TiB"', 1 << 40),
    ],
)
def test_sizes(tmp_path: Path, written: str, size: int) -> None:
    found = limits_of(f"[functions.f.limits.cpu-avx2]\npeak_memory = {written}\n", tmp_path)
    assert found["m.f.cpu-avx2"].peak_memory == size


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            """
            [functions.f.limits.cpu-avx2]
            peak_memory = "2 gigs"
            flops = -1
            bytes_accessed = "2Gib"
            executable_size = true
            compile_time = "1h"
            allow_unknown = 1
            """,
            """\
            m.toml: functions.f.limits.cpu-avx2.peak_memory: "2 gigs": there is no unit gigs
              write one of B, GB, GiB, kB, KiB, MB, MiB, TB, TiB
            m.toml: functions.f.limits.cpu-avx2.flops: -1 is not a number
              write for example 1500000 or "1.5e12"
            m.toml: functions.f.limits.cpu-avx2.bytes_accessed: "2Gib": there is no unit Gib
              did you mean "GiB"?
            m.toml: functions.f.limits.cpu-avx2.executable_size: true is not a size
              write for example "2GiB", "500MB" or 1500000
            m.toml: functions.f.limits.cpu-avx2.compile_time: "1h" is not a number of seconds
              write for example 60
            m.toml: functions.f.limits.cpu-avx2.allow_unknown: 1 is not true or false
              write for example allow_unknown = true""",
        ),
        (
            """
            [functions.f.limits.cpu-avx2]
            peak_memory = "0.3B"
            flops = "2GB"
            collectives = { all_reduce = 1, all-gather = "x" }
            """,
            """\
            m.toml: functions.f.limits.cpu-avx2.peak_memory: "0.3B" is not a whole number
              write for example "2GiB", "500MB" or 1500000
            m.toml: functions.f.limits.cpu-avx2.flops: "2GB" is a number with a unit
              write for example 1500000 or "1.5e12"
            m.toml: functions.f.limits.cpu-avx2.collectives.all_reduce: there is no collective "all_reduce"
              did you mean "all-reduce"?
            m.toml: functions.f.limits.cpu-avx2.collectives.all-gather: "x" is not a number
              write for example 1500000 or "1.5e12\"""",
        ),
        (
            "[functions.f.limits.cpu-avx2]\npeak_memry = 3",
            """\
            m.toml: functions.f.limits.cpu-avx2.peak_memry: unknown key
              did you mean "peak_memory"?""",
        ),
        (
            "limits = 3",
            """\
            m.toml: functions.f.limits: 3 is not a table
              write a table such as [functions.NAME.limits.cpu] with peak_memory = "2GiB\"""",
        ),
        (
            "limits = { cpu-avx2 = 3 }",
            """\
            m.toml: functions.f.limits.cpu-avx2: 3 is not a table
              write a table such as [functions.NAME.limits.cpu] with peak_memory = "2GiB\"""",
        ),
        (
            "[functions.f.limits.cpu-avx]\nflops = 3",
            """\
            m.toml: functions.f.limits.cpu-avx: "cpu-avx" is not in targets
              did you mean "cpu-avx2"?""",
        ),
        (
            "[functions.f.limits.v5e-2x2]\nflops = 3",
            """\
            m.toml: functions.f.limits.v5e-2x2: "v5e-2x2" is not in targets
              did you mean "v5e:2x2"?""",
        ),
    ],
)
def test_faults(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(StagecError) as caught:
        limits_of(table, tmp_path)
    assert str(caught.value) == dedent(message)


@pytest.mark.parametrize(("key", "value"), [("flops", 5), ("compile_time", 5), ("allow_unknown", True)])
def test_limits_change_one_slice(tmp_path: Path, key: str, value: Any) -> None:
    written = "true" if value is True else value
    without, limited = limits_of("", tmp_path), limits_of(f"[functions.f.limits.cpu-avx2]\n{key} = {written}", tmp_path)
    assert without["m.f.v5e-2x2"] == limited["m.f.v5e-2x2"]
    assert getattr(limited["m.f.cpu-avx2"], key) == value
