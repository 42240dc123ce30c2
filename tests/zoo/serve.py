"""Run every case on a bundle in a process where jax cannot be imported: serve.py BUNDLE OUTPUT.npz."""

import sys

sys.modules["jax"] = None  # type: ignore[assignment]  # import jax raises ModuleNotFoundError

import numpy as np

import stagec
from tests.zoo.flat import flat
from tests.zoo.inputs import cases

bundle = stagec.load(sys.argv[1])
np.savez(sys.argv[2], **flat({name: bundle[f](*args, **kwargs) for name, (f, args, kwargs) in cases().items()}))
