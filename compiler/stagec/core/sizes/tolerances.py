"""How far two computations of a value may differ. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagec.core.sizes.avals import Aval, parse_aval

# Bits of the fraction of floating-point dtypes: the distance of 1 to the next number is 2 to the minus that.
_FRACTION = {"f64": 52, "c128": 52, "f32": 23, "c64": 23, "f16": 10, "bf16": 7}
_FRACTION_OF_F8 = 2
# Where XLA rounds the factors of an f32 product, if nobody asks for a precision: to TF32 and bfloat16.
_FRACTION_OF_FACTORS = {"cuda": 10, "tpu": 7}


def tolerance(aval: Aval, platform: str = "") -> float:
    """Return the tolerance between two computations of a value of this dtype: the square root of its epsilon.

    Relative, and absolute about 1; 0 for integers and booleans. platform: where one of the two runs; f32 and c64 have
    the epsilon there that factors of a product have.
    """
    if aval.dtype[0] not in "fc" and aval.dtype != "bf16":
        return 0.0
    fraction = _FRACTION.get(aval.dtype, _FRACTION_OF_F8)
    if aval.dtype in ("f32", "c64"):
        fraction = _FRACTION_OF_FACTORS.get(platform, fraction)
    return float(2 ** (-fraction / 2))


def tolerances(row: Mapping[str, Any], platform: str = "") -> tuple[float, float]:
    """Return the relative and the absolute tolerance of a golden result, by its row in a bundle's index.

    Without its own, it is `tolerance` for the platform where the other computation ran.
    """
    usual = tolerance(parse_aval(row["aval"]), platform)
    return row.get("rtol", usual), row.get("atol", usual)
