"""Abstract values: the dtype and shape of an array without its data, in JAX's short notation.

`f32[batch,64]` is a float32 array of shape (batch, 64), `f32` and `f32[]` are scalars, `~f32[]` is a weakly typed one.
Manifests, specs of actions and descriptions inside bundles use the same strings.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stagec.core.sizes.frozen import Frozen
from stagec.core.sizes.names import is_name


class DType(NamedTuple):
    """The meaning of a short dtype name.

    numpy_name: its name in numpy (with ml_dtypes). For PRNG keys: the name of the dtype of their words.
    bits: bits of one element. A PRNG key of 64 bits is stored as two uint32 words, in an extra last dimension.
    """

    numpy_name: str
    bits: int


DTYPES: Mapping[str, DType] = {
    "bool": DType("bool", 8),
    "i1": DType("int1", 1),
    "i2": DType("int2", 2),
    "i4": DType("int4", 4),
    "i8": DType("int8", 8),
    "i16": DType("int16", 16),
    "i32": DType("int32", 32),
    "i64": DType("int64", 64),
    "u1": DType("uint1", 1),
    "u2": DType("uint2", 2),
    "u4": DType("uint4", 4),
    "u8": DType("uint8", 8),
    "u16": DType("uint16", 16),
    "u32": DType("uint32", 32),
    "u64": DType("uint64", 64),
    "f4_e2m1fn": DType("float4_e2m1fn", 4),
    "f6_e2m3fn": DType("float6_e2m3fn", 6),
    "f6_e3m2fn": DType("float6_e3m2fn", 6),
    "f8_e3m4": DType("float8_e3m4", 8),
    "f8_e4m3": DType("float8_e4m3", 8),
    "f8_e4m3b11fnuz": DType("float8_e4m3b11fnuz", 8),
    "f8_e4m3fn": DType("float8_e4m3fn", 8),
    "f8_e4m3fnuz": DType("float8_e4m3fnuz", 8),
    "f8_e5m2": DType("float8_e5m2", 8),
    "f8_e5m2fnuz": DType("float8_e5m2fnuz", 8),
    "f8_e8m0fnu": DType("float8_e8m0fnu", 8),
    "bf16": DType("bfloat16", 16),
    "f16": DType("float16", 16),
    "f32": DType("float32", 32),
    "f64": DType("float64", 64),
    "c64": DType("complex64", 64),
    "c128": DType("complex128", 128),
    "f0": DType("float0", 0),
    "key<fry>": DType("uint32", 64),
    "key<rbg>": DType("uint32", 128),
    "key<urbg>": DType("uint32", 128),
}
"""Every dtype of JAX arrays, by JAX's short name. `f0` is float0, the type of the derivative of an integer."""

NOT_EXPORTABLE: Mapping[str, str] = {
    "f6_e2m3fn": "f8_e4m3fn",
    "f6_e3m2fn": "f8_e5m2",
    "i1": "i4",
    "i2": "i4",
    "u1": "u4",
    "u2": "u4",
}
"""Dtypes of JAX that its export format lacks -> the replacement."""

FILES = ("safetensors:", "msgpack:", "orbax:")
"""The start of a leaf of a tree of avals that stands for the arrays of a file. The file's path follows, and then
`?sep=SEPARATOR` of a safetensors file whose names are paths, or `?at=PATH` of a part of a checkpoint."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
"""A dimension that is a number. Nearly all are: a bundle of a thousand functions has tens of thousands. A process that
has only these and names never imports `core.sizes.size`."""


def mlir_name(dtype: str) -> str:
    """Return the element type that MLIR writes for a dtype, given by its short or its numpy name: "f8E4M3FN".

    Of PRNG keys and float0 there is none, and MLIR's "i1" are booleans.
    """
    short = SHORT_NAMES.get(dtype, dtype)
    if short in ("c64", "c128"):
        return f"complex<f{DTYPES[short].bits // 2}>"
    special, underscore, kind = short.partition("_")
    if underscore:
        return f"{special}{kind.upper()}"
    return "i1" if short == "bool" else f"ui{short[1:]}" if short[0] == "u" else short


SHORT_NAMES = {dtype.numpy_name: short for short, dtype in DTYPES.items() if not short.startswith("key<")}
"""Our names of dtypes by numpy's; PRNG keys have none of their own."""
_LONGEST = 10_000
"""Characters of an aval: far beyond any that a model has, and read at once."""
_HOW_TO_WRITE = 'write for example "f32[batch,64]" (dtype[dim,dim,...]; a name is a symbolic dimension)'


class AvalError(ValueError):
    """An aval, or a shape, that stagec cannot read or evaluate.

    what: what is wrong, starting with the text at fault in double quotes.
    write: the correction.
    """

    what: str
    write: str

    def __init__(self, what: str, write: str) -> None:
        super().__init__(what, write)
        self.what = what
        self.write = write

    def __str__(self) -> str:
        return f"{self.what}; {self.write}"


class Aval(Frozen):
    """An abstract array.

    dtype: a short name: a key of DTYPES.
    shape: sizes >= 0, or dimension expressions over symbolic dimensions in canonical spelling; () for a scalar.
    weak_type: JAX's weak type: the type of a Python number, which gives way to the other operand's.

    Two with the same fields are equal.
    """

    dtype: str
    shape: tuple[int | str, ...]
    weak_type: bool

    def __init__(self, dtype: str, shape: tuple[int | str, ...], weak_type: bool = False) -> None:
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "weak_type", weak_type)

    def __eq__(self, other: object) -> bool:
        if type(other) is not Aval:
            return NotImplemented
        return (self.dtype, self.shape, self.weak_type) == (other.dtype, other.shape, other.weak_type)

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, self.weak_type))

    def __repr__(self) -> str:
        return f"Aval({self.dtype!r}, {self.shape!r}, {self.weak_type!r})"

    def __str__(self) -> str:
        """The canonical spelling; `parse_aval` gives back an equal Aval."""
        return f"{'~' * self.weak_type}{self.dtype}[{','.join(str(dim) for dim in self.shape)}]"


def arrow(inputs: Iterable[object], outputs: Iterable[object]) -> str:
    """Return the parameters and results of a function, four of each: "(f32[2,3], i32[]) -> (f32[])"."""

    def side(avals: Iterable[object]) -> str:
        shown = list(map(str, avals))
        more = [f"... {len(shown) - 4} more"] if len(shown) > 4 else []
        return f"({', '.join([*shown[:4], *more])})"

    return f"{side(inputs)} -> {side(outputs)}"


@functools.lru_cache(4096)
def parse_aval(text: str) -> Aval:
    """Reads the short notation of an aval. Raises AvalError."""
    if len(text) > _LONGEST:
        raise AvalError(f'"{text[:40]}...": over {_LONGEST:,} characters', _HOW_TO_WRITE)
    weak_type = text.strip().startswith("~")
    name, bracket, rest = text.strip().removeprefix("~").partition("[")
    if "]" in name:
        raise AvalError(f'"{text}": missing "[" in aval', _HOW_TO_WRITE)
    _check_dtype(text, name.strip())
    dimensions, closing, after = rest.rpartition("]")
    if bracket and not closing:
        raise AvalError(f'"{text}": missing "]" in aval', _HOW_TO_WRITE)
    if after:
        raise AvalError(f'"{text}": "{after}" after the aval', _HOW_TO_WRITE)
    if dimensions.count("(") != dimensions.count(")"):
        raise AvalError(f'"{text}": parentheses do not match', _HOW_TO_WRITE)
    shape = tuple(_read_dimension(text, part) for part in _split(dimensions)) if dimensions.strip() else ()
    return Aval(name.strip(), shape, weak_type)


def physical(aval: Aval) -> Aval:
    """Return the aval in the module for `aval`: for float0 bools; for a PRNG key its words, in a last dimension."""
    if aval.dtype == "f0":
        return Aval("bool", aval.shape)
    if not aval.dtype.startswith("key<"):
        return aval
    return Aval("u32", (*aval.shape, DTYPES[aval.dtype].bits // 32))


def num_bytes(aval: Aval) -> int:
    """Return how many whole bytes an array of static shape takes."""
    return math.prod(map(int, aval.shape)) * DTYPES[aval.dtype].bits // 8


def dimension_variables(shape: Iterable[int | str]) -> tuple[str, ...]:
    """The names of the symbolic dimensions in a shape, each once, sorted; () for a static shape."""
    symbolic = {dim for dim in shape if isinstance(dim, str)}
    names = set(filter(is_name, symbolic))
    if names != symbolic:
        from stagec.core.sizes.size import names_in

        names = names.union(*map(names_in, symbolic - names))
    return tuple(sorted(names))


def evaluate_shape(shape: Iterable[int | str], bucket: Mapping[str, int]) -> tuple[int, ...]:
    """The concrete shape with the sizes of `bucket` for symbolic dimensions.

    Raises AvalError if a name is missing from the bucket or a size comes out negative.
    """
    return tuple(dim if isinstance(dim, int) else _evaluate(dim, bucket) for dim in shape)


_MEANT = {
    "float": "f32",
    "single": "f32",
    "double": "f64",
    "half": "f16",
    "fp32": "f32",
    "fp16": "f16",
    "fp64": "f64",
    "bfloat": "bf16",
    "fp8": "f8_e4m3fn",
    "int": "i32",
    "long": "i64",
    "uint": "u32",
    "byte": "u8",
    "char": "u8",
    "complex": "c64",
    "boolean": "bool",
    "pred": "bool",
    "key": "key<fry>",
}
"""Names that other libraries have, and the dtype that most of their readers mean."""


def _check_dtype(text: str, name: str) -> None:
    if name in DTYPES:
        return
    if not name:
        raise AvalError(f'"{text}": missing dtype in aval', _HOW_TO_WRITE)
    if name in SHORT_NAMES:
        short = SHORT_NAMES[name]
        raise AvalError(f'"{text}": "{name}" is not a short dtype name', f"write {short}")
    import difflib  # only a mistake needs it

    closest = _MEANT.get(name) or "".join(difflib.get_close_matches(name, DTYPES, n=1, cutoff=0.5))
    raise AvalError(
        f'"{text}": unknown dtype "{name}"',
        f"write {closest}" if closest else f"write one of {', '.join(DTYPES)}",
    )


def _split(dimensions: str) -> list[str]:
    """Splits at the commas outside parentheses; one comma at the end is allowed, as in Python."""
    parts, depth = [""], 0
    for character in dimensions:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts[:-1] if len(parts) > 1 and not parts[-1].strip() else parts


def _read_dimension(text: str, part: str) -> int | str:
    if _NUMBER.fullmatch(part):
        return int(part)
    if is_name(part):
        return part
    from stagec.core.sizes.size import DimensionError, canonical_dimension

    try:
        return canonical_dimension(part)
    except DimensionError as error:
        raise AvalError(f'"{text}": {error}', _HOW_TO_WRITE) from None


def _evaluate(dim: str, bucket: Mapping[str, int]) -> int:
    if is_name(dim) and bucket.get(dim, -1) >= 0:
        return bucket[dim]
    from stagec.core.sizes.size import DimensionError, evaluate

    sizes = ", ".join(f"{name} = {bucket[name]}" for name in dimension_variables([dim]) if name in bucket)
    try:
        size = evaluate(dim, bucket)
    except DimensionError as error:
        raise AvalError(f'"{dim}": {error}', f"the sizes given are: {sizes or 'none'}") from None
    if size < 0:
        raise AvalError(f'"{dim}" is {size} for {sizes}', "a dimension is 0 or more")
    return size


def holds(dtype: str, number: float) -> bool:
    """Whether an array of the dtype can have this element, rounded if it is a float."""
    if dtype[0] in "fc" or dtype == "bf16":
        return True
    if dtype == "bool":
        return number in (0, 1)
    bits = DTYPES[dtype].bits
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype[0] == "i" else (0, (1 << bits) - 1)
    return number == int(number) and low <= number <= high
