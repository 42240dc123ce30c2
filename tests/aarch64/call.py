"""Call every function of a bundle with numbers that are the same everywhere: `call.py BUNDLE RESULTS.npz`."""

import json
import sys

import ml_dtypes
import numpy as np

import stagec

bundle = stagec.load(sys.argv[1], policy="executable_only")
random = np.random.default_rng(0)
dtypes = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f64": np.float64, "c64": np.complex64, "i8": np.int8}


def values(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    return (random.normal(size=shape) * (8 if dtype is np.int8 else 1)).astype(dtype)


calls = {
    "dense": ({"w": values((64, 32)), "b": values((32,))}, values((8, 64))),
    "dtypes": tuple(values((48, 48), dtypes[name]) for name in ("f64", "f16", "bf16", "i8", "c64")),
    "factorize": (values((16, 16)),),
}
results = {}
for name, arguments in calls.items():
    result = bundle[name](*arguments)
    for key, array in (result if isinstance(result, dict) else {"f32": result}).items():
        results[f"{name}.{key}"] = np.asarray(array, np.float32 if key == "bf16" else None)
np.savez(sys.argv[2], **results)
targets = {name: bundle[name].descriptions[0].target.name for name in calls}
verdicts = {c.offer.target or "exported": c.code for c in bundle.select("dense").candidates}
print(json.dumps({"targets": targets, "verdicts": verdicts}))
