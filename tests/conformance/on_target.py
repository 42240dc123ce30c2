"""Run programs compiled for a named target, or by JAX for the same CPU; print digests of the results.

python -m tests.conformance.on_target ours|theirs PROGRAM...
"""

import functools
import hashlib
import json
import os
import subprocess
import sys

from stagec.backends.cpu import compiler as cpu
from stagec.core.builds.specs import CpuTarget
from tests.building import COMPILER, ROOT

TARGET = CpuTarget("avx2", "AVX2", 2, {})


@functools.cache
def digests(side: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return the digest of each program's results, from a process of its own: compiling for a target binds it."""
    site_packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    env = {"PYTHONPATH": os.pathsep.join([*site_packages, str(COMPILER), str(ROOT)]), "JAX_PLATFORMS": "cpu"}
    env |= cpu.environment(TARGET)
    command = [sys.executable, "-B", "-s", "-m", "tests.conformance.on_target", side, *names]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main(side: str, names: list[str]) -> None:
    if side == "ours":
        cpu.prepare_process(TARGET)
    from tests.conformance.programs import programs
    from tests.conformance.staged import pair

    found, every = {}, programs(sharded=False)
    for name in names:
        staged = getattr(pair(name, every[name]), side)
        if side == "ours":
            compiled = staged.lowered.compile(target=TARGET)
        else:
            with cpu.presented(TARGET):  # JAX has no way to name a CPU
                compiled = staged.compiled
        found[name] = hashlib.sha256(repr(staged.results(compiled)).encode()).hexdigest()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
