"""The first export of a process that forks for the others: it leaves nothing that their bytes could depend on."""

import subprocess
import sys

from tests.building import action_environment

# In a process of its own: JAX must not have been used.
PROGRAM = """
import os, sys
import jax
from jax._src import xla_bridge
from stagec.cli.actions import export
from stagec.frontends.common import repeatable
from stagec.frontends.jax import warming

warm, warming.warm = warming.warm, lambda: True
export.preload()

def packages():
    return {name.partition(".")[0] for name in sys.modules}

def state():
    settings = {name: holder.value for name, holder in jax.config._value_holders.items()}
    return [sorted(packages()), sys.path[:], dict(os.environ), sorted(settings.items()), repeatable._state()]

def changed():
    return [(before, after) for before, after in zip(was, map(repr, state())) if before != after]

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_default_prng_impl", "threefry2x32")
jax.config.update("jax_traceback_filtering", "off")
jax.config.update("jax_traceback_in_locations_limit", 0)
was = [repr(part) for part in state()]
assert warm()
assert not changed(), changed()
assert not xla_bridge.backends_are_initialized()
assert len(os.listdir("/proc/self/task")) == 1
assert jax.local_devices()[0].platform == "cpu"
print("well")
"""


def test_it_starts_nothing_and_changes_no_setting() -> None:
    command = [sys.executable, "-B", "-s", "-c", PROGRAM]
    done = subprocess.run(command, env=action_environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
