"""What README and docs/loading.md promise of the wheel alone: promises.py BUNDLE PORTABLE COMPILED OUTPUT.npz.

It runs where nothing is installed but the wheel and what that requires. BUNDLE is the zoo, PORTABLE the same without
executables, COMPILED a serialized `Compiled` of x * 2. OUTPUT gets the results of every case of both bundles.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import jaxlib
import numpy as np

import stagec
from tests.zoo.flat import flat
from tests.zoo.inputs import cases

assert [name for name in ("cryptography", "jax", "pydantic") if importlib.util.find_spec(name)] == []
built, portable, compiled, output = sys.argv[1:]

results = {}
for name, path in (("built", built), ("portable", portable)):
    with stagec.load(path, devices=stagec.devices("cpu", 4)) as bundle:
        results[name] = {case: bundle[f](*args, **kwargs) for case, (f, args, kwargs) in cases().items()}
np.savez(output, **flat(results))

# The stages after tracing.
vector = np.ones(8, np.float32)
exported = stagec.Exported.deserialize(Path(built).with_name("zoo.loop.exported").read_bytes())
assert stagec.Exported.deserialize(exported.serialize()) == exported
np.testing.assert_equal(flat(exported.call(vector)), flat(stagec.load(portable)["loop"](vector)))
assert stagec.Compiled.deserialize(Path(compiled).read_bytes())(vector)[0] == 2


def raised(call: Callable[[], object]) -> Exception:
    """What a call raises."""
    try:
        call()
    except (stagec.LoadError, ModuleNotFoundError) as error:
        return error
    raise AssertionError("nothing was raised")


# What only an extra of the wheel brings is asked for by name.
unsigned = raised(lambda: stagec.load(built, keys=[b"a key"]))
assert str(unsigned).endswith("the package cryptography, which is not installed: pip install cryptography")
untraced = raised(lambda: stagec.jit(abs))
assert str(untraced) == (
    f"stagec.jit needs the package jax, which is not installed: pip install jax=={jaxlib.__version__}, "
    'or write frontend="arrays" for a function of stagec_arrays.numpy'
)
assert "jit" in dir(stagec)
assert "Wrapped" in dir(stagec)
assert "Traced" in dir(stagec)
