"""Write the weights of a file with 8 and with 4 bits: quantize.py FLOATS.safetensors FOLDER."""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

GROUP = 32
FLOAT8 = ml_dtypes.float8_e4m3fn


def int8(w: np.ndarray) -> dict[str, np.ndarray]:
    """Return whole numbers from -127 to 127 and a scale for each column."""
    scale = np.maximum(np.abs(w).max(axis=0), 1e-12) / 127
    return {"w": np.round(w / scale).astype(np.int8), "scale": scale}


def float8(w: np.ndarray) -> dict[str, np.ndarray]:
    """Return e4m3fn floats, whose largest is 448, and a scale for each column."""
    scale = np.maximum(np.abs(w).max(axis=0), 1e-12) / np.float32(ml_dtypes.finfo(FLOAT8).max)
    return {"w": (w / scale).astype(FLOAT8), "scale": scale}


def int4(w: np.ndarray) -> dict[str, np.ndarray]:
    """Return two whole numbers from -7 to 7 in a byte, and a scale for each column of a group of rows."""
    groups = w.reshape(-1, GROUP, w.shape[1])
    scale = np.maximum(np.abs(groups).max(axis=1), 1e-12) / 7
    numbers = (np.round(groups / scale[:, None]) + 8).astype(np.uint8).reshape(w.shape)
    return {"w": numbers[::2] | numbers[1::2] << 4, "scale": scale}


def main(floats: str, folder: str) -> None:
    """Write int8.safetensors, float8.safetensors and int4.safetensors."""
    arrays = load_file(floats)
    for quantize in (int8, float8, int4):
        written = {name: array for name, array in arrays.items() if not name.endswith(".w")}
        for name in arrays.keys() - written.keys():
            written |= {f"{name[:-1]}{key}": array for key, array in quantize(arrays[name]).items()}
        save_file(dict(sorted(written.items())), Path(folder) / f"{quantize.__name__}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
