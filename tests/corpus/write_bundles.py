"""Write a bundle of each kind that a format has: python -m tests.corpus.write_bundles FOLDER, from the root.

A folder is never changed after a release: stagec must read what it holds for as long as docs/releases.md promises. The
functions add what their bundle has to their argument; `test_bundles.py` knows the results. `several.aot` is what
`stagec add-jaxlib`, with another jaxlib, then makes of itself.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.building import build

HEAD = '[manifest]\nname = "KIND"\nversion = "1"\n\n'
PLAIN = """[functions.shift]
entry = "model:shift"
args = ["f32[3]", "f32[n]"]
buckets = { n = [1, 3] }
targets = ["cpu-avx2"]
bind = { by = WEIGHTS }
"""
KEYED = """[functions.keyed]
entry = "model:keyed"
avals = "model:keyed_avals"
targets = ["cpu-avx2"]
"""
MODEL = """import jax
import jax.numpy as jnp


def shift(by, x):
    return x + by.sum()


def keyed(x):
    return {1: x[1] + 1, 5: x[5] * 2}


def keyed_avals():
    return ({1: jax.ShapeDtypeStruct((2,), jnp.float32), 5: jax.ShapeDtypeStruct((2,), jnp.float32)},)
"""
MANIFESTS = {
    "plain": PLAIN.replace("WEIGHTS", '"by.safetensors"') + "golden = {}\n[functions.shift.padding]\nn = {}\n",
    "keyed": KEYED,
    "external": PLAIN.replace("WEIGHTS", '{ file = "by.safetensors", external = true }') + KEYED,
    "several": PLAIN.replace("WEIGHTS", '"by.safetensors"'),
}


def main(folder: Path) -> None:
    folder.mkdir()
    for name, functions in MANIFESTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            (root / "m.toml").write_text(HEAD.replace("KIND", name) + functions)
            (root / "model.py").write_text(MODEL)
            save_file({"by": np.array([1, 2, 4], np.float32)}, root / "by.safetensors")
            (folder / f"{name}.aot").write_bytes(build("m.toml", root, root).read_bytes())
            (folder / "by.safetensors").write_bytes((root / "by.safetensors").read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
