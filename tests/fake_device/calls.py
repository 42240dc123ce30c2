"""Call a function of the bundle of fake.toml, twice each, and print what came of it; a test's process.

python -m tests.fake_device.calls BUNDLE FUNCTION...
"""

import json
import sys
import traceback
from typing import Any

import ml_dtypes
import numpy as np

import stagec

PARAMS = {"w": np.ones((16, 4), np.float32), "b": np.arange(4, dtype=np.float32)}


def mlp(bundle: stagec.Bundle) -> Any:
    return bundle["mlp"](PARAMS, np.ones((1, 16), np.float32))


def flat(bundle: stagec.Bundle) -> Any:
    leaves = [PARAMS["b"], PARAMS["w"], np.ones((1, 16), np.float32)]
    return bundle["mlp"].flat(PARAMS, leaves[-1])(*leaves)


def update(bundle: stagec.Bundle) -> Any:
    """On the device, where the state is donated; nothing is left of it."""
    (device,) = stagec.devices("cuda", 1)
    state = stagec.device_put({"x": np.arange(4, dtype=np.float32), "y": [np.float32(1)]}, device)
    before = device.memory_stats()["bytes_in_use"]
    for _ in range(3):
        last, state = state, bundle["update"](state, np.float32(1))
        assert last["x"].is_deleted()
    assert device.memory_stats()["bytes_in_use"] == before
    return [state["x"], *state["y"]]


def narrow(bundle: stagec.Bundle) -> Any:
    arrays = [np.ones(4, dtype) for dtype in (ml_dtypes.bfloat16, np.int8, bool)]
    result = bundle["narrow"](*arrays, np.zeros((0, 3), np.float32))
    return [result[name].astype(np.float32) for name in ("a", "b", "c", "empty")]


def halves(bundle: stagec.Bundle) -> Any:
    more, total = bundle["halves"](np.arange(12, dtype=np.float32).reshape(4, 3))
    return [more, total]


def jax(bundle: stagec.Bundle) -> Any:
    """With JAX's arrays, in a process in which JAX starts after the bundle was loaded."""
    from jax import numpy as jnp

    first = mlp(bundle)
    # Read before it fails: afterwards JAX itself can make no array.
    arrays = {name: jnp.asarray(value) for name, value in PARAMS.items()}, jnp.ones((1, 16))
    result = bundle["mlp"](*arrays)
    assert {device.device_kind for device in result.devices()} == {stagec.devices("cuda")[0].device_kind}
    return [first, result]


CALLS = {"mlp": mlp, "flat": flat, "update": update, "narrow": narrow, "halves": halves, "jax": jax}


def main() -> None:
    """Print a row for each call: its results, or the class, code and message of its error."""
    rows: list[Any] = []
    path, *names = sys.argv[1:]
    if "jax" in names:
        import jax as _
    for name in names:
        for _ in range(2):
            try:
                with stagec.load(path, policy="executable_only") as bundle:
                    results = CALLS[name](bundle)
                    rows.append([np.asarray(x).tolist() for x in (results if isinstance(results, list) else [results])])
            except (stagec.LoadError, stagec.CallError, stagec.RunError) as error:
                rows.append([type(error).__name__, error.code, str(error)])
            except Exception as error:  # noqa: BLE001 - an error without a code fails the test
                rows.append([type(error).__name__, "", traceback.format_exc()])
    # jaxlib imports it with the parts of an array on several devices.
    assert not {"jax", "halves"}.isdisjoint(names) or "jax" not in sys.modules
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
