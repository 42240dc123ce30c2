"""Call every function with jax.jit, and from its bundle with the libraries' objects: reference.py FOLDER OUTPUT.npz.

FOLDER has the bundles. The arguments and what jax.jit made of them go to OUTPUT.npz, for serve.py. The status is 1 if
anything differs.
"""

import importlib
import os
import sys
from pathlib import Path

import jax
import numpy as np
from cases import GROUPS, functions, report

import stagec
from stagec.backends.cpu import compiler as cpu
from stagec.core.builds.specs import CpuTarget


def named(place):
    """Return what MODULE:NAME names."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def leaves(tree, is_filtered=False):
    """Return the leaves as arrays; of PRNG keys their words. is_filtered: as `eqx.filter_jit`, without what is none."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype") or not is_filtered]
    is_key = [hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in arrays]
    return [np.asarray(jax.random.key_data(leaf) if key else leaf) for leaf, key in zip(arrays, is_key, strict=True)]


folder, output = map(Path, sys.argv[1:])
cases = {(group, name): places for group in GROUPS for name, places in functions(group).items()}
expected, filtered = {}, {}
# JAX looks at the CPU when it makes its client. Sums of convolutions differ with the number of threads.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
with cpu.presented(CpuTarget("cpu", "AVX2", 2, {})):
    # 500 programs make the arguments, and each runs once: to optimize them takes longer than to run them.
    jax.config.update("jax_disable_most_optimizations", True)
    given = {case: named(arguments)() for case, (_, arguments) in cases.items()}
    jax.config.update("jax_disable_most_optimizations", False)
    for case, (entry, _) in cases.items():
        function = named(entry)
        filtered[case] = hasattr(function, "lower")  # it is one of eqx.filter_jit
        jitted = function if filtered[case] else jax.jit(function)
        expected[case] = jax.block_until_ready(jitted(*given[case]))

stored, same = {}, True
for case, args in given.items():
    group, name = case
    # The expected result is an example: a result has from it what no description can make, such as a lambda.
    with stagec.load(folder / group / f"{group}.aot", types=[args, expected[case]], policy="executable_only") as bundle:
        result = bundle[name](*args)
    found, wanted = (leaves(tree, filtered[case]) for tree in (result, expected[case]))
    same &= report(name, "with classes", wanted, found)
    if jax.tree.structure(result) != jax.tree.structure(expected[case]):
        print(f"{name}: {jax.tree.structure(result)}\n  is not\n{jax.tree.structure(expected[case])}")
        same = False
    for part, tree in (("args", args), ("result", expected[case])):
        stored |= {f"{name}/{part}/{number}": leaf for number, leaf in enumerate(leaves(tree, filtered[case]))}
np.savez(output, **stored)
sys.exit(not same)
