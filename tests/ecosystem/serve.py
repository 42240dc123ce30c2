"""Call every function in a process that can import neither jax nor a library: serve.py FOLDER OUTPUT.npz.

Arguments are containers of Python, by the paths of their arrays. OUTPUT.npz is from reference.py.
"""

import os
import sys

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # as in reference.py
for module in ("jax", "flax", "equinox", "optax", "haiku", "keras", "mujoco"):
    sys.modules[module] = None  # to import it raises ModuleNotFoundError

from pathlib import Path

import numpy as np
from cases import GROUPS, functions, report

import stagec

folder, stored = Path(sys.argv[1]), np.load(sys.argv[2])
same = True
for group in GROUPS:
    bundle = stagec.load(folder / group / f"{group}.aot", policy="executable_only")
    for name in functions(group):
        args, expected = (
            [
                stored[f"{name}/{part}/{number}"]
                for number in range(sum(n.startswith(f"{name}/{part}/") for n in stored))
            ]
            for part in ("args", "result")
        )
        (description,) = bundle[name].descriptions
        positional, keywords = description.in_tree.unflatten(args)  # no classes are given: dicts, lists and tuples
        result = bundle[name](*positional, **keywords)
        same &= report(name, "without classes", expected, description.out_tree.flatten(result))
sys.exit(not same)
