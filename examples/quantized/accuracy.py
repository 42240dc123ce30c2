"""Print size and accuracy of each function of the bundle: accuracy.py quantized.aot."""

import sys

import numpy as np
from sklearn.datasets import load_digits

import stagec

FIRST = 1200
"""The images from here on were not in the training."""


def main(path: str) -> None:
    """Compare the functions on images that the model has not seen."""
    digits = load_digits()
    images, labels = (digits.data[FIRST:] / 16).astype(np.float32), digits.target[FIRST:]
    with stagec.load(path, policy="executable_only") as bundle:
        exact = bundle["predict"](images)
        print("function         KiB  accuracy  largest error")
        for name, function in bundle.items():
            scores = function(images)
            size = sum(weight.dtype.itemsize * np.prod(weight.shape) for weight in function.weights.values())
            right = (scores.argmax(axis=1) == labels).mean()
            print(f"{name:14} {size / 1024:5.1f}  {right:8.2%}  {np.abs(scores - exact).max():13.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
