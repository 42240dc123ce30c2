"""Trees of arrays as flat dicts that numpy can store: dtypes of ml_dtypes become bytes."""

from typing import Any

import numpy as np


def flat(tree: Any, path: str = "") -> dict[str, np.ndarray[Any, Any]]:
    if tree is None:
        return {}
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {key: value for name, child in items for key, value in flat(child, f"{path}/{name}").items()}
    array = np.asarray(tree)
    return {f"{path}:{array.dtype}{list(array.shape)}": np.frombuffer(array.tobytes(), np.uint8)}
