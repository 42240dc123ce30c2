"""What builds are compared with: jit, compile and serialize all functions of a workspace in one process with JAX.

`python plain.py WORKSPACE OUTPUT [CACHE]`; CACHE is a folder of JAX's persistent compilation cache.
"""

import importlib
import json
import pickle
import sys
from pathlib import Path

import jax
from jax.experimental import serialize_executable


def main(workspace: str, output: str, cache: str = "") -> None:
    """Build everything."""
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    sys.path.insert(0, workspace)
    Path(output).mkdir(parents=True, exist_ok=True)
    for name, args in json.loads(Path(workspace, "avals.json").read_text()).items():
        function = getattr(importlib.import_module(f"models.{name}"), name)
        compiled = jax.jit(function).lower(*jax.tree.map(_aval, args)).compile()
        Path(output, name).write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))


def _aval(text: str) -> jax.ShapeDtypeStruct:
    shape = text.removeprefix("f32[").removesuffix("]").split(",")
    return jax.ShapeDtypeStruct([int(size) for size in shape], "float32")


if __name__ == "__main__":
    main(*sys.argv[1:])
