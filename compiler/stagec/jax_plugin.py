"""What JAX imports when it starts, wherever stagec is installed: an entry point of the group `jax_plugins`.

So a program that nobody changed finds what stagec built: `JAX_COMPILATION_CACHE_DIR` is enough.
"""

from __future__ import annotations

import os
from pathlib import Path

from stagec.jaxcache import jax_entries

__all__: list[str] = []


def initialize() -> None:
    """Import `stagec.jax_cache` if JAX's cache is a folder that stagec built. JAX calls this, and logs its errors."""
    import jax  # which calls this

    folder = jax.config.values["jax_compilation_cache_dir"]
    if folder and (os.environ.get("STAGEC_JAX_CACHE_KEYS") or Path(folder, jax_entries.INDEX).is_file()):
        try:
            import stagec.jax_cache  # noqa: F401
        except BaseException:
            jax.config.update("jax_enable_compilation_cache", False)  # it would read entries that nobody checks
            raise
